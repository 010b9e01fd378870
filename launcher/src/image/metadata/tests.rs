//! Small images of every maker.

use super::super::testing::{Random, Scratch};
use super::super::tree::DirectoryTree;
use super::*;

fn job(name: &OsStr) -> Option<OsString> {
    (name == "DISPLAY").then(|| OsString::from(":0"))
}

fn try_read(image: &Scratch) -> Result<Metadata, Failure> {
    read_with(&DirectoryTree::open(image.path()).unwrap(), &job)
}

fn read_image(image: &Scratch) -> Metadata {
    try_read(image).unwrap()
}

fn system(image: &Scratch) -> String {
    operating_system(&DirectoryTree::open(image.path()).unwrap()).unwrap()
}

fn pairs(metadata: &Metadata) -> Vec<(&str, &str)> {
    metadata
        .environment
        .iter()
        .map(|(name, value)| (name.to_str().unwrap(), value.to_str().unwrap()))
        .collect()
}

fn failure(image: &Scratch) -> String {
    try_read(image).unwrap_err().message
}

#[test]
fn a_plain_image_says_nothing() {
    let image = Scratch::new();
    image.file("etc/environment", "PATH=/from/debian\n");
    image.directory("etc/rc.d");
    image.file("etc/rc.d/rc", "#!/bin/bash\n# boot $@\n");
    image.link("etc/rc", "rc.d/rc");
    assert_eq!(read_image(&image), Metadata::new(Maker::Plain), "Red Hat's /etc/rc is not enroot's");
}

#[test]
fn an_oci_configuration() {
    let image = Scratch::new();
    image.file(
        ".mizzen/config.json",
        r#"{"architecture": "arm64", "os": "linux", "config": {"User": "nobody", "Env": ["PATH=/a:/b", "E=",
           "X=1=2", "novalue", "N=a\u0000b"], "Entrypoint": ["/entry", "-x"], "Cmd": ["sh"],
           "WorkingDir": "work", "Labels": {"a": "b", "n": 1}}, "rootfs": {"type": "layers"}}"#,
    );
    let metadata = read_image(&image);
    assert_eq!(metadata.maker, Maker::Oci);
    assert_eq!(pairs(&metadata), [("PATH", "/a:/b"), ("E", ""), ("X", "1=2")]);
    assert_eq!(metadata.not_understood, ["/.mizzen/config.json:Env[3]", "/.mizzen/config.json:Env[4]"]);
    assert_eq!(metadata.entrypoint, ["/entry", "-x"]);
    assert_eq!(metadata.command, ["sh"]);
    assert_eq!(metadata.workdir.as_deref(), Some(Path::new("/work")));
    assert_eq!((metadata.labels["a"].as_str(), metadata.labels["n"].as_str()), ("b", "1"));
    assert_eq!(metadata.architecture, Some(Architecture::Aarch64));
    let nulls =
        r#"{"config": {"Env": null, "Entrypoint": null, "Cmd": null, "Labels": null, "WorkingDir": ""}}"#;
    image.file(".mizzen/config.json", nulls);
    assert_eq!(read_image(&image), Metadata::new(Maker::Oci));
}

#[test]
fn damaged_documents_name_file_and_position() {
    let image = Scratch::new();
    image.file(".mizzen/config.json", "{\"config\":\n  {\"Env\": [1]}}");
    let start = "/.mizzen/config.json in the image is damaged: ";
    assert_eq!(
        failure(&image),
        format!("{start}invalid type: integer `1`, expected a string at line 2 column 12")
    );
    image.file(".mizzen/config.json", "");
    assert_eq!(failure(&image), format!("{start}EOF while parsing a value at line 1 column 0"));
    image.file(".mizzen/config.json", "{\"config\": {\"Cmd\": [\"a\\u0000b\"]}}");
    assert_eq!(failure(&image), format!("{start}Cmd contains a NUL"));
    image.file(".mizzen/config.json", "{\"config\": {\"Cmd\": \"a\\nb\\u001b\"}}");
    assert!(!failure(&image).contains(['\n', '\x1b']));
    image.file(".mizzen/config.json", "[".repeat(100_000));
    assert!(failure(&image).starts_with(start), "deep nesting is an error, not a stack overflow");
    image.file(".mizzen/config.json", " ".repeat(FILE_LIMIT + 1));
    assert_eq!(failure(&image), "/.mizzen/config.json in the image has more than 1048576 bytes");
}

#[test]
fn an_image_of_enroot() {
    let image = Scratch::new();
    image.file(
        "etc/environment",
        "PATH=/usr/bin\n# note\nDISPLAY=${DISPLAY}\nQ=\"q\"\nX=a${NONE}b$HOME${\n\nbad\n",
    );
    let script = "# org.label a b\n\nmkdir -p \"/work dir\" 2> /dev/null\n\
        cd \"/work dir\" && unset OLDPWD || exit 1\n\n\
        if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\nif [ $# -gt 0 ]; then\n    exec \"$@\"\nfi\n";
    image.file("etc/rc", script);
    let metadata = read_image(&image);
    assert_eq!(metadata.maker, Maker::Enroot);
    assert_eq!(
        pairs(&metadata),
        [("PATH", "/usr/bin"), ("DISPLAY", ":0"), ("Q", "\"q\""), ("X", "ab$HOME${")]
    );
    assert_eq!(metadata.not_understood, ["/etc/environment:7"]);
    assert_eq!(metadata.entrypoint, ["/bin/sh", "/etc/rc"]);
    assert_eq!(metadata.workdir.as_deref(), Some(Path::new("/work dir")));
    assert_eq!(metadata.labels["org.label"], "a b");
}

#[test]
fn an_image_of_singularity() {
    let image = Scratch::new();
    image.file(".singularity.d/env/01-base.sh", "if x; then\n");
    image.file(
        ".singularity.d/env/10-docker2singularity.sh",
        "#!/bin/sh\nexport PATH=\"/opt/bin:/usr/bin\"\nexport LANG=\"${LANG:-\"C\"}\"\n",
    );
    image
        .file(".singularity.d/env/90-environment.sh", "#!/bin/sh\nexport PATH=/first:$PATH\nmodule load x\n");
    image.file(".singularity.d/env/91-environment.sh", "A=1; export A\n");
    image.file(".singularity.d/env/README", "B=1; export B\n");
    image.file(".singularity.d/labels.json", "{\"org.label-schema.build-arch\": \"amd64\", \"n\": 3}");
    image.executable(".singularity.d/runscript", "#!/bin/sh\nexec \"$@\"\n");
    let metadata = read_image(&image);
    assert_eq!(metadata.maker, Maker::Singularity);
    let path = "/first:/opt/bin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin:/bin";
    assert_eq!(pairs(&metadata), [("PATH", path), ("LANG", "C"), ("A", "1")]);
    assert_eq!(metadata.not_understood, ["/.singularity.d/env/90-environment.sh:3"]);
    assert_eq!(metadata.entrypoint, ["/.singularity.d/runscript"]);
    assert_eq!(metadata.labels["n"], "3");
    image.file(".singularity.d/labels.json", "{\"a\": ");
    assert!(failure(&image).starts_with("/.singularity.d/labels.json in the image is damaged: EOF"));
}

#[test]
fn an_image_of_charliecloud() {
    let image = Scratch::new();
    image.file(
        "ch/metadata.json",
        r#"{"arch": "arm64/v8", "arg": {}, "cwd": "/w", "env": {"A": "unused"}, "labels": {"l": "v"},
           "history": [], "shell": ["/bin/sh", "-c"], "volumes": []}"#,
    );
    let lines = "BAR=bar\nFOO=$BAR:baz\nF2=baz:$UNSET:qux\nF3=:a::\nF4=''''\nF5='a b'\nF6=$UNSET\nF7=$\n\
        F8=\"b\" # c\nF9=$DISPLAY\nno separator\n=x\n";
    image.file("ch/environment", lines);
    let metadata = read_image(&image);
    assert_eq!(metadata.maker, Maker::Charliecloud);
    let expected = [
        ("BAR", "bar"),
        ("FOO", "bar:baz"),
        ("F2", "baz:qux"),
        ("F3", ":a::"),
        ("F4", "''"),
        ("F5", "a b"),
        ("F6", ""),
        ("F7", "$"),
        ("F8", "\"b\" # c"),
        ("F9", ":0"),
    ];
    assert_eq!(pairs(&metadata), expected);
    assert_eq!(metadata.not_understood, ["/ch/environment:11", "/ch/environment:12"]);
    assert_eq!(metadata.workdir.as_deref(), Some(Path::new("/w")));
    assert_eq!((metadata.labels["l"].as_str(), metadata.architecture), ("v", Some(Architecture::Aarch64)));
    std::fs::remove_file(image.path().join("ch/environment")).unwrap();
    assert_eq!(pairs(&read_image(&image)), [("A", "unused")], "without the file, the document's variables");
}

#[test]
fn the_operating_system() {
    let image = Scratch::new();
    image.file("usr/lib/os-release", "ID=alpine\nVERSION_ID='3.20'\n");
    assert_eq!(system(&image), "alpine 3.20");
    image.directory("etc");
    image.link("etc/os-release", "../usr/lib/os-release");
    image.file("usr/lib/os-release", "NAME=x\nPRETTY_NAME=\"Debian \x1b[1m 12\"\n");
    assert_eq!(system(&image), "Debian \\u{1b}[1m 12");
}

#[test]
fn hostile_images_fail_or_say_nothing() {
    let image = Scratch::new();
    image.link(".singularity.d", "/.singularity.d");
    assert!(failure(&image).starts_with("/.singularity.d in the image: Too many levels"));
    let image = Scratch::new();
    image.file("ch", "a file");
    image.file(".mizzen", "a file");
    assert_eq!(read_image(&image).maker, Maker::Plain);
    let image = Scratch::new();
    image.directory("ch");
    image.link("ch/environment", "/proc/self/environ");
    image.link("ch/metadata.json", "../../../../../../etc/hostname");
    assert_eq!(read_image(&image).maker, Maker::Plain, "the host's files are not there");
    image.directory(".mizzen/config.json");
    assert!(failure(&image).contains("is a directory, and must be a file"));
    let image = Scratch::new();
    image.directory(".singularity.d/env");
    (0..65).for_each(|n| drop(image.file(&format!(".singularity.d/env/{n:02}.sh"), "")));
    assert_eq!(failure(&image), "/.singularity.d/env in the image has 65 scripts, more than 64");
}

#[test]
fn another_machines_image_is_refused() {
    let check = |made_for, host| check_against(Path::new("/i.sqsh"), made_for, host);
    let failure = check(Some(Architecture::Aarch64), Some(Architecture::X86_64)).unwrap_err();
    assert_eq!(failure.message, "/i.sqsh: made for aarch64, this node is x86_64");
    check(Some(Architecture::I686), Some(Architecture::X86_64)).unwrap();
    check(None, Some(Architecture::X86_64)).unwrap();
    // A wrong claim does not count against what the programs are.
    let image = Scratch::new();
    let claimed = if host_architecture() == Some(Architecture::S390x) { "arm64" } else { "s390x" };
    image.file(".mizzen/config.json", format!("{{\"architecture\": \"{claimed}\"}}"));
    let check = |image: &Scratch| {
        let tree = DirectoryTree::open(image.path()).unwrap();
        check_architecture(image.path(), &tree, &read_image(image))
    };
    check(&image).unwrap_err();
    image.file("bin/sh", &std::fs::read("/proc/self/exe").unwrap()[..64]);
    check(&image).unwrap();
}

#[test]
fn mutated_environment_files_never_panic() {
    let seed = b"PATH=/a:/b\nFOO=$PATH:x\nBAR='q'\n# c\nD=${DISPLAY}x${\nE=$\n".to_vec();
    let pieces: &[&[u8]] = &[b"=", b"$", b"${", b"}", b"'", b":", b"\n", b"\0", b"\xff", b"${DISPLAY}"];
    let mut random = Random::new(0xc4a);
    let (charliecloud, enroot) = (Scratch::new(), Scratch::new());
    enroot.file("etc/rc", "exec \"$@\"");
    for _ in 0..1500 {
        let mut text = seed.clone();
        random.mutate(&mut text, pieces);
        charliecloud.file("ch/environment", &text);
        enroot.file("etc/environment", &text);
        for image in [&charliecloud, &enroot] {
            for (name, value) in read_image(image).environment {
                assert!(Variables::fits(name.as_bytes(), value.as_bytes()));
            }
        }
    }
}
