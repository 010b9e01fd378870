//! What is built and installed: the files themselves, without Slurm.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use mizzen_tests::{Release, repository, run_tool, target_dir};

fn staged(path: &str) -> PathBuf {
    let file = target_dir().join("stage").join(path);
    assert!(file.exists(), "{} is missing: run `make stage`", file.display());
    file
}

fn plugin() -> PathBuf {
    staged("usr/lib/mizzen/spank_mizzen.so")
}

#[test]
fn the_plugin_exports_what_slurm_needs_and_nothing_else() {
    let listing = run_tool(Command::new("nm").args(["-D", "--defined-only", "-P"]).arg(plugin())).unwrap();
    let exported: BTreeSet<&str> =
        listing.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let expected = BTreeSet::from([
        "plugin_name",
        "plugin_type",
        "plugin_version",
        "slurm_spank_exit",
        "slurm_spank_init",
        "slurm_spank_init_failure_mode",
        "slurm_spank_init_post_opt",
        "slurm_spank_local_user_init",
        "slurm_spank_task_exit",
        "slurm_spank_task_init",
        "slurm_spank_task_init_privileged",
        "slurm_spank_task_post_fork",
        "spank_plugin_version",
    ]);
    assert_eq!(exported, expected);
}

#[test]
fn the_plugin_needs_only_what_every_slurm_and_old_systems_have() {
    let listing = run_tool(Command::new("nm").args(["-D", "--undefined-only", "-P"]).arg(plugin())).unwrap();
    let mut from_slurm = BTreeSet::new();
    for line in listing.lines() {
        let mut words = line.split_whitespace();
        let (name, kind) = (words.next().unwrap(), words.next().unwrap());
        match name.split_once('@').map(|(_, version)| version.trim_start_matches('@')) {
            Some(version) => {
                let number = version.strip_prefix("GLIBC_").or(version.strip_prefix("GCC_")).unwrap();
                let parts: Vec<u32> = number.split('.').map(|part| part.parse().unwrap()).collect();
                assert!(parts <= vec![2, 28], "{name} is newer than glibc 2.28");
            }
            None if kind == "w" => {} // the standard library uses it where glibc has it
            None => drop(from_slurm.insert(name)),
        }
    }
    let expected = BTreeSet::from([
        "slurm_error",
        "slurm_info",
        "spank_context",
        "spank_get_item",
        "spank_job_control_setenv",
        "spank_option_register",
        "spank_setenv",
        "spank_unsetenv",
    ]);
    assert_eq!(from_slurm, expected);
    assert!(fs::metadata(plugin()).unwrap().len() < 2 << 20, "the plugin is larger than 2 MiB");
}

#[test]
fn the_shipped_bindings_fit_the_headers_of_every_release() {
    let repository = target_dir().join("..").canonicalize().unwrap();
    let shipped = fs::read_to_string(repository.join("spank-plugin/src/spank/bindings.rs")).unwrap();
    let build_dir = target_dir().join("bindings");
    for release in Release::ALL {
        let include = release.rootfs().unwrap().join("usr/include").canonicalize().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args([
                "build",
                "--quiet",
                "--jobs=1", // beside tests that measure time
                "-p",
                "spank-mizzen",
                "--features",
                "bindgen",
                "--message-format=json",
            ])
            .arg("--target-dir")
            .arg(&build_dir)
            .current_dir(&repository)
            .env("SLURM_INCLUDE_DIR", &include);
        let messages = run_tool(&mut cargo).unwrap();
        let out_dir = messages
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter(|message| message["package_id"].as_str().is_some_and(|id| id.contains("spank-plugin")))
            .find_map(|message| message["out_dir"].as_str().map(PathBuf::from))
            .unwrap();
        let generated = fs::read_to_string(out_dir.join("bindings.rs")).unwrap();
        let generated: BTreeSet<&str> = generated.lines().collect();
        // A newer header may have more; what the plugin knows must be the same.
        let differing: Vec<&str> =
            shipped.lines().filter(|line| !line.contains("_unused") && !generated.contains(line)).collect();
        assert!(differing.is_empty(), "{release}: {differing:#?}");
        println!("{release}: bindings agree");
    }
}

#[test]
fn the_installed_plugstack_line_names_the_installed_plugin() {
    let lines = fs::read_to_string(staged("etc/slurm/plugstack.conf.d/mizzen.conf")).unwrap();
    assert!(lines.lines().any(|line| line == "required /usr/lib/mizzen/spank_mizzen.so"), "{lines}");
    for file in [
        "etc/mizzen/mizzen.toml",
        "usr/share/doc/mizzen/mizzen.toml",
        "usr/lib/mizzen/mizzen-import",
        "usr/share/man/man1/mizzen-run.1",
        "usr/share/man/man1/mizzen-images-prune.1",
        "usr/share/man/man5/mizzen.toml.5",
        "usr/share/man/man7/mizzen-slurm.7",
        "usr/share/bash-completion/completions/mizzen",
    ] {
        assert!(fs::metadata(staged(file)).unwrap().len() > 0, "{file}");
    }
}

#[test]
fn groff_renders_every_man_page_without_a_warning() {
    let mut pages = 0;
    for section in ["man1", "man5", "man7"] {
        for page in fs::read_dir(staged("usr/share/man").join(section)).unwrap() {
            let page = page.unwrap().path();
            let mut groff = Command::new("groff");
            let output =
                groff.args(["-ww", "-man", "-Kutf8", "-Tutf8", "-P-cbou"]).arg(&page).output().unwrap();
            assert!(output.status.success() && output.stderr.is_empty(), "{}: {output:?}", page.display());
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains("NAME\n") && text.contains("SEE ALSO\n"), "{}: {text}", page.display());
            // A digest in an example is longer than a line.
            let mut wide = text.lines().filter(|line| line.chars().count() > 80 && !line.contains("sha256:"));
            assert_eq!(wide.next(), None, "{}", page.display());
            pages += 1;
        }
    }
    assert!(pages > 20, "{pages} pages");
}

#[test]
fn the_launcher_needs_no_library_of_the_node() {
    let headers = run_tool(Command::new("readelf").arg("--dynamic").arg(staged("usr/bin/mizzen"))).unwrap();
    assert!(!headers.contains("(NEEDED)"), "{headers}");
}

/// It starts on every distribution, and finds what the launcher hands it.
#[test]
fn the_importer_needs_no_library_of_the_node() {
    let importer = staged("usr/lib/mizzen/mizzen-import");
    let headers = run_tool(Command::new("readelf").arg("--dynamic").arg(&importer)).unwrap();
    assert!(!headers.contains("(NEEDED)"), "{headers}");
    let mizzen = |args: &[&str]| {
        let output = Command::new(staged("usr/bin/mizzen"))
            .args(args)
            .env("XDG_DATA_HOME", "/nonexistent")
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let shown = "/nonexistent/mizzen/images: 0 images, 0.0 MB\n";
    let (code, stdout, stderr) = mizzen(&["images"]);
    assert!(code == 0 && stdout.ends_with(shown) && stderr.is_empty(), "{stdout}{stderr}");
    let (code, stdout, stderr) = mizzen(&["images", "remove", "ubuntu"]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(
        stderr.starts_with("mizzen: /nonexistent/mizzen/images: there is no image store yet\n"),
        "{stderr}"
    );
    let (code, _, stderr) = mizzen(&["import"]);
    assert!(code == 2 && stderr.contains("<SOURCE>"), "{stderr}");
}

#[test]
fn the_launcher_checks_the_configuration() {
    let mizzen = |args: &[&str]| {
        let output = Command::new(staged("usr/bin/mizzen")).args(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let file = format!("/root/mizzen-test-{}.toml", std::process::id());
    fs::write(&file, "image_folders = [\"/usr/share\"]\n").unwrap();
    assert_eq!(mizzen(&["check-config", &file]), (0, format!("{file}: good\n"), String::new()));
    fs::write(&file, "\nimages = []\n").unwrap();
    let (code, _, stderr) = mizzen(&["check-config", &file]);
    fs::remove_file(&file).unwrap();
    assert_eq!(code, 1);
    assert!(stderr.starts_with(&format!("mizzen: {file}:2: unknown field `images`")), "{stderr}");
    assert!(stderr.contains("mizzen: hint: "), "{stderr}");
    let (code, _, stderr) = mizzen(&["check-config", &file]);
    assert!(code == 1 && stderr.starts_with(&format!("mizzen: {file}: no such file")), "{stderr}");
    assert_eq!(mizzen(&["no-such-command"]).0, 2);
}

#[test]
fn the_command_enroot_is_installed_where_it_is_asked_for() {
    let names = |asked: &[&str]| {
        let root = target_dir().join(format!("install-{}-{}", std::process::id(), asked.len()));
        let mut make = Command::new("make");
        make.current_dir(repository()).args(["--silent", "install", "FROM=target/portable", "PREFIX=/usr"]);
        run_tool(make.arg(format!("DESTDIR={}", root.display())).args(asked)).unwrap();
        let link = fs::read_link(root.join("usr/bin/enroot")).ok();
        let launcher = root.join("usr/bin/mizzen").exists();
        fs::remove_dir_all(&root).unwrap();
        (launcher, link)
    };
    assert_eq!(names(&[]), (true, None));
    assert_eq!(names(&["ENROOT=yes"]), (true, Some(PathBuf::from("mizzen"))));
}
