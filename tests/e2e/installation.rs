//! `make install` and `make uninstall`, and where versions stand.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mizzen_tests::{repository, run_tool, target_dir};

const LINE: &str = "etc/slurm/plugstack.conf.d/mizzen.conf";
const PLUGIN: &str = "usr/lib/mizzen/spank_mizzen.so";

/// A directory for DESTDIR, empty at first, and removed at the end.
struct Destination(PathBuf);

impl Destination {
    fn new(name: &str) -> Destination {
        let directory = target_dir().canonicalize().unwrap().join(format!("install-{name}"));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        Destination(directory)
    }

    fn make(&self, target: &str) -> Output {
        let mut make = Command::new("make");
        make.args([target, "FROM=target/portable", "PREFIX=/usr", &format!("DESTDIR={}", self.0.display())]);
        make.current_dir(repository()).env_remove("MAKEFLAGS").output().unwrap()
    }

    #[track_caller]
    fn makes(&self, target: &str) {
        let output = self.make(target);
        assert!(output.status.success(), "make {target}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// All files, relative to the directory.
    fn files(&self) -> BTreeSet<String> {
        let found = run_tool(Command::new("find").arg(&self.0).args(["!", "-type", "d", "-printf", "%P\n"]));
        found.unwrap().lines().map(str::to_owned).collect()
    }

    fn append(&self, file: &str, text: &str) {
        let file = self.0.join(file);
        fs::write(&file, fs::read_to_string(&file).unwrap_or_default() + text).unwrap();
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn what_an_administrator_has_changed_stays() {
    let there = Destination::new("changed");
    there.makes("install");
    let inode = |file: &str| fs::metadata(there.0.join(file)).unwrap().ino();
    let plugin = inode(PLUGIN);
    let of_a_running_step = fs::File::open(there.0.join(PLUGIN)).unwrap(); // or the number may be given again
    there.append(LINE, "# mine\n");
    there.append("etc/mizzen/mizzen.toml", "# mine\n");
    there.makes("install");
    assert_ne!(inode(PLUGIN), plugin, "the plugin comes by rename");
    drop(of_a_running_step);
    let text = |file: &str| fs::read_to_string(there.0.join(file)).unwrap();
    for file in [LINE, "etc/mizzen/mizzen.toml"] {
        assert!(text(file).ends_with("# mine\n"), "{file}");
    }
    assert!(!text("usr/share/doc/mizzen/mizzen.toml").contains("# mine"));
    there.makes("uninstall");
    let removed_line = format!("{LINE}.removed");
    assert_eq!(there.files(), ["etc/mizzen/mizzen.toml", &removed_line].map(str::to_owned).into());
}

#[test]
fn uninstall_leaves_nothing_of_ours() {
    let there = Destination::new("nothing");
    there.makes("install");
    there.makes("uninstall");
    assert_eq!(there.files(), BTreeSet::new());
}

/// Without the plugin, such a line would end every job.
#[test]
fn uninstall_wants_lines_of_the_administrators_removed_first() {
    let there = Destination::new("line");
    there.makes("install");
    let before = there.files();
    there.append("etc/slurm/plugstack.conf", "required /usr/lib/mizzen/spank_mizzen.so\n");
    let refused = there.make("uninstall");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success(), "{said}");
    let line = there.0.join("etc/slurm/plugstack.conf");
    for message in [
        "mizzen: without the plugin, Slurm would fail every job here while this is in its configuration; remove it first:\n",
        &format!("mizzen: {}:required /usr/lib/mizzen/spank_mizzen.so\n", line.display()),
    ] {
        assert!(said.contains(message), "expected: {message}\n{said}");
    }
    fs::remove_file(line).unwrap();
    assert_eq!(there.files(), before);
    there.makes("uninstall");
}

#[test]
fn programs_and_changelog_have_the_version_of_cargo_toml() {
    let version = env!("CARGO_PKG_VERSION");
    let said = run_tool(Command::new(target_dir().join("stage/usr/bin/mizzen")).arg("--version")).unwrap();
    assert_eq!(said.split_whitespace().take(2).collect::<Vec<_>>(), ["mizzen", version], "{said}");
    let changelog = fs::read_to_string(repository().join("CHANGELOG.md")).unwrap();
    let mut headings = changelog.lines().filter(|line| line.starts_with("## "));
    assert_eq!(headings.next(), Some("## [Unreleased]"));
    let newest = headings.next().unwrap();
    assert!(newest.starts_with(&format!("## [{version}] - 20")), "{newest}");
}

/// Every POSIX shell runs what packages run: Debian's and Ubuntu's is dash.
#[test]
fn maintainer_scripts_are_for_any_shell() {
    for script in ["plugstack.sh", "deb/postinst", "deb/prerm", "deb/postrm"] {
        let script: &Path = &repository().join("packaging").join(script);
        run_tool(Command::new("dash").arg("-n").arg(script)).unwrap();
        let text = fs::read_to_string(script).unwrap();
        assert!(text.starts_with("#!/bin/sh\n") && text.contains("\nset -e"), "{}", script.display());
    }
}
