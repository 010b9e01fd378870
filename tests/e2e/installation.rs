//! `make install` and `make uninstall`, and where versions stand.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
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
    // As docs/admins.md tells where AppArmor restricts user namespaces.
    fs::create_dir_all(there.0.join("etc/apparmor.d")).unwrap();
    symlink("/usr/share/mizzen/apparmor/mizzen", there.0.join("etc/apparmor.d/mizzen")).unwrap();
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

/// Spack finds a package of its API v2 by the path, which is also the path of a Python module. What the package has `make` do is done
/// here without Spack, whose part is played by a few lines.
#[test]
fn the_package_for_spack_is_where_spack_looks_and_installs() {
    let spack = repository().join("packaging/spack/spack_repo/mizzen");
    assert_eq!(
        fs::read_to_string(spack.join("repo.yaml")).unwrap(),
        "repo:\n  namespace: mizzen\n  api: v2.0\n"
    );
    let there = Destination::new("spack");
    let mut python = Command::new("python3");
    python.arg("-c").arg(AS_SPACK).arg(spack.join("packages/mizzen/package.py")).arg(&there.0);
    run_tool(python.current_dir(repository()).env("FROM", "target/portable").env_remove("MAKEFLAGS"))
        .unwrap();
    let files = there.files();
    for file in [
        "bin/mizzen",
        "lib/mizzen/spank_mizzen.so",
        "lib/mizzen/mizzen-import",
        "etc/mizzen/mizzen.toml",
        "etc/mizzen/host.d/nvidia.toml",
        "etc/slurm/plugstack.conf.d/mizzen.conf",
    ] {
        assert!(files.contains(file), "{file}: {files:?}");
    }
    let line = fs::read_to_string(there.0.join("etc/slurm/plugstack.conf.d/mizzen.conf")).unwrap();
    assert!(
        line.ends_with(&format!("\nrequired {}/lib/mizzen/spank_mizzen.so\n", there.0.display())),
        "{line}"
    );
}

/// Loads a package and installs it into a directory: `python3 -c … PACKAGE.PY PREFIX`.
const AS_SPACK: &str = r#"
import os, runpy, subprocess, sys, types

class Prefix(str):
    etc = property(lambda self: os.path.join(self, "etc"))

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)

def make(*words, extra_env=None):
    subprocess.run(["make", *words], check=True, stdout=subprocess.DEVNULL)

directives = dict.fromkeys(["license", "version", "depends_on", "conflicts"], lambda *_, **__: None)
for package in ["spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"]:
    module(package)
module("spack_repo.builtin.build_systems.makefile", MakefilePackage=type("MakefilePackage", (), {}))
module("spack.package", make=make, make_jobs=1, EnvironmentModifications=object, join_path=os.path.join, **directives)
package = runpy.run_path(sys.argv[1])["Mizzen"]()
package.install(None, Prefix(sys.argv[2]))
"#;

/// An archive of the sources, as `make dist` makes it, gives the same packages as the repository: their maintainer, dates and version
/// come from the commit. Where nothing tells of a commit, whoever packs is asked for.
#[test]
fn packages_of_an_archive_name_the_commit() {
    let there = Destination::new("archive");
    let unpack = format!("git archive HEAD | tar -x -C {}", there.0.display());
    run_tool(Command::new("sh").args(["-ec", &unpack]).current_dir(repository())).unwrap();
    let make = |directory: &Path, git: &str| {
        let mut make = Command::new("make");
        make.args(["--print-data-base", "maintainer"]).current_dir(directory).env("GIT_DIR", git);
        make.env_remove("MAKEFLAGS").env_remove("DEBEMAIL").output().unwrap()
    };
    let names = |output: &Output| -> Vec<String> {
        let database = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_name = |line: &&str| {
            ["MAINTAINER := ", "DATE := ", "COMMIT := "].iter().any(|name| line.starts_with(name))
        };
        database.lines().filter(is_name).map(str::to_owned).collect()
    };
    let (archive, own) = (make(&there.0, "/nonexistent"), repository().join(".git"));
    let expected = names(&make(&repository(), own.to_str().unwrap()));
    assert_eq!(names(&archive), expected);
    assert!(expected.len() == 3 && expected.iter().all(|line| !line.ends_with(":= ")), "{expected:?}");
    fs::copy(repository().join("packaging/commit"), there.0.join("packaging/commit")).unwrap();
    let refused = make(&there.0, "/nonexistent");
    let message = "who answers for the packages? There is no commit here to tell: add DEBFULLNAME=\"NAME\" DEBEMAIL=ADDRESS\n";
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.starts_with(message), "{said}");
}

/// Where users can make names in Slurm's directory, root writes through no link of theirs.
#[test]
fn the_plugins_line_is_written_through_no_link() {
    let there = Destination::new("links");
    there.makes("install");
    fs::remove_file(there.0.join(LINE)).unwrap();
    let precious = there.0.join("precious");
    fs::write(&precious, "precious\n").unwrap();
    for name in [LINE, "etc/slurm/plugstack.conf"] {
        symlink(&precious, there.0.join(format!("{name}.new"))).unwrap();
    }
    let script = there.0.join("usr/lib/mizzen/plugstack");
    run_tool(Command::new("sh").arg(script).arg("enable").env("DESTDIR", &there.0)).unwrap();
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious\n");
    for (name, text) in [
        (LINE, "required /usr/lib/mizzen/spank_mizzen.so\n"),
        ("etc/slurm/plugstack.conf", "include /etc/slurm/plugstack.conf.d/*.conf\n"),
    ] {
        let made = there.0.join(name);
        assert!(fs::read_to_string(&made).unwrap().ends_with(text), "{name}");
        assert_eq!(fs::metadata(&made).unwrap().mode() & 0o7777, 0o644, "{name}");
    }
    let left: Vec<String> = there.files().into_iter().filter(|name| name.starts_with("etc/slurm/")).collect();
    let links = [LINE, "etc/slurm/plugstack.conf"].map(|name| [name.to_owned(), format!("{name}.new")]);
    assert_eq!(BTreeSet::from_iter(left), BTreeSet::from_iter(links.concat()));
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
