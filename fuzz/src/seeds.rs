//! What the fuzzers start from: one good input of every form, made with the real tools where there are some.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use mizzen_import::registry::fuzz::SEEDS;
use mizzen_tests::images::{ImageTree, sif};
use rustix::fs::{XattrFlags, setxattr};

/// The seeds of a parser.
pub fn of(name: &str) -> Result<Vec<Vec<u8>>> {
    let texts = |texts: &[&str]| Ok(texts.iter().map(|text| text.as_bytes().to_vec()).collect());
    match name {
        "squashfs" => squashfs(),
        "sif" => Ok(vec![sif(&packed(PLAIN)?)]),
        "elf" => libraries(),
        "ld-cache" => Ok(vec![fs::read("/etc/ld.so.cache")?]),
        "metadata" => texts(&METADATA),
        "cdi" => texts(&CDI),
        "request" => texts(&REQUESTS),
        "handover" => texts(&HANDOVERS),
        "config" => texts(&[include_str!("../../conf/mizzen.toml"), CONFIG]),
        "environment" => texts(&ENVIRONMENTS),
        "options" => texts(&[OPTIONS]),
        "slurm-command" => texts(&["E\0", "K\u{9}", "R\u{7f}no such command\nload a module", ORDER]),
        "profile" => texts(&[
            "mizzen-profile 1\n0 131072 /usr/bin/python3\n4096 0 /usr/lib/a b\nend\n",
            "mizzen-unpacked 3 5a5a5a5a-0000-4000-8000-000000000000\nd 11 1700000000 99 0 /\nf 12 1700000000 99 131072 /usr/bin/python3\nend\n",
            "mizzen-unpacking 1 7d1f 262144\nf 12 1700000000 99 131072 /usr/bin/python3\np 13 1700000000 99 4096 /a\n",
            "f 493 1700000000 131072 /usr/bin/python3\nd 493 1 0 /\nd 493 1 0 /usr\nd 1023 1 0 /usr/bin\n",
        ]),
        "partial-record" => Ok(partial_records()),
        "tar" => archives(),
        "layer" => layers(),
        "writer" => Ok(mizzen_import::fuzz::writer_seeds()),
        "manifest" | "headers" | "credentials" => {
            let seeds = SEEDS.iter().filter(|(parser, _)| *parser == name);
            Ok(seeds.map(|(_, text)| text.as_bytes().to_vec()).collect())
        }
        _ => bail!("{name} has no seeds"),
    }
}

fn partial_records() -> Vec<Vec<u8>> {
    let record = |size: u64, marks: &[u8]| {
        let mut bytes = format!(
            "{{\"version\":1,\"boot\":\"7f4c3a52-95ff-4d0c-9a0e-1f5f6f0c8a11\",\"chunk\":131072,\"source\":\"/shared/a.sqsh\",\
             \"identity\":{{\"dev\":55,\"ino\":7,\"size\":{size},\"mtime\":[1700000000,5],\"ctime\":[1700000001,0]}}}}"
        )
        .into_bytes();
        bytes.resize(4096, 0);
        bytes.extend(marks);
        bytes
    };
    vec![record(0, b""), record(131_072, b"D"), record(400_000, b"wD\0w")]
}

/// Uncompressed, so that a change of a byte is a change of what it means, and not a broken stream.
const PLAIN: &[&str] = &["-noI", "-noX", "-noD", "-noF"];

fn squashfs() -> Result<Vec<Vec<u8>>> {
    let layouts: [&[&str]; 9] = [
        PLAIN,
        &["-noI", "-noX", "-noD", "-noF", "-no-fragments", "-no-exports"],
        &["-noI", "-noX", "-noD", "-noF", "-no-xattrs"],
        &["-comp", "gzip"],
        &["-comp", "lzma"],
        &["-comp", "xz"],
        &["-comp", "lzo"],
        &["-comp", "lz4"],
        &["-comp", "zstd"],
    ];
    layouts.into_iter().map(packed).collect()
}

/// A tree in each format of tar archives.
fn archives() -> Result<Vec<Vec<u8>>> {
    let tree = ImageTree::empty()?;
    tree.file("bin/sh", "#!/bin/true\n")?;
    tree.file(&format!("{}/name", "long".repeat(60)), "")?;
    tree.file("etc/sparse", "start")?;
    tree.link("etc/link", &"far".repeat(60))?;
    let sparse = fs::File::options().write(true).open(tree.path("etc/sparse"))?;
    sparse.set_len(40 << 10)?;
    setxattr(tree.path("bin/sh"), "user.own", b"x", XattrFlags::empty()).context("extended attributes")?;
    let options: [&[&str]; 5] = [
        &["--format=gnu", "--sparse"],
        &["--format=pax", "--sparse", "--xattrs"],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=oldgnu"],
    ];
    let archive = |options: &&[&str]| {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(tree.path("")).args(["-b1", "-cf", "-"]).args(*options).args(["bin", "etc"]);
        Ok(tar.arg("long".repeat(60)).output().context("tar")?.stdout)
    };
    options.iter().map(archive).collect()
}

/// The same, compressed.
fn layers() -> Result<Vec<Vec<u8>>> {
    let mut layers = archives()?;
    for program in ["gzip", "zstd", "xz"] {
        let mut child =
            Command::new(program).arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().context("no pipe")?.write_all(&layers[0])?;
        layers.push(child.wait_with_output()?.stdout);
    }
    Ok(layers)
}

/// A small image with files of several kinds.
fn packed(options: &[&str]) -> Result<Vec<u8>> {
    let tree = ImageTree::empty()?;
    tree.file("bin/sh", "#!/bin/true\n")?;
    tree.file("etc/os-release", "PRETTY_NAME=\"Small\"\n")?;
    tree.file("etc/blocks", &"two blocks and the rest ".repeat(400))?;
    tree.file(".singularity.d/env/90-environment.sh", "export A=\"$B:${C:-d}\"\n")?;
    tree.link("etc/link", "../bin/sh")?;
    let attributes = tree.path("etc/os-release");
    for (name, value) in [("user.own", "x".repeat(30)), ("user.other", String::new())] {
        setxattr(&attributes, name, value.as_bytes(), XattrFlags::empty()).context("extended attributes")?;
    }
    tree.squashfs(&[&["-nopad", "-b", "4K", "-all-root"], options].concat())
}

/// Small ones of this machine, which need others and have symbol versions.
fn libraries() -> Result<Vec<Vec<u8>>> {
    let directory = format!("/lib/{}-linux-gnu", std::env::consts::ARCH);
    let names = ["libdl.so.2", "librt.so.1", "libutil.so.1", "libanl.so.1"];
    let found: Vec<Vec<u8>> =
        names.iter().filter_map(|name| fs::read(Path::new(&directory).join(name)).ok()).collect();
    if found.is_empty() { bail!("none of {names:?} is in {directory}") } else { Ok(found) }
}

/// See `image_metadata` in launcher/src/fuzz.rs.
const METADATA: [&str; 5] = [
    r#"o{"architecture": "amd64", "config": {"Env": ["PATH=/a:/b", "E=", "novalue"], "Entrypoint": ["/entry", "-x"],
       "Cmd": ["sh"], "WorkingDir": "work", "Labels": {"a": "b", "n": 1}}}"#,
    "s#!/bin/sh\nexport PATH=\"/opt/bin:/usr/bin\"\nexport A=\"${A:-\"x y\"}\" B='q'\0A=$B; export A\nif true; then\n  C=$(id)\nfi\n\
     D=a\\ b\"$HOME/${E:=f}\"\0{\"org.label\": \"x\", \"n\": null}",
    "cPATH=/a:$PATH\nA='b c'\n\0{\"arch\": \"arm64\", \"cwd\": \"/w\", \"env\": {\"A\": \"b\"}, \"labels\": {\"a\": \"b\"}}",
    "c\0{\"env\": {\"A\": \"b\"}}",
    "eA=b\n#c\nDISPLAY=${DISPLAY}\n\0# name value\n\ncd \"/work\" && unset OLDPWD || exit 1\nexec \"$@\"\n",
];

const CDI: [&str; 2] = [
    "cdiVersion: 0.7.0\nkind: nvidia.com/gpu\nannotations: {a: b}\ncontainerEdits:\n  env: [A=b]\n  hooks:\n  \
     - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, create-symlinks, --link, a::/b/c]}\n  \
     - hookName: createContainer\n    path: /usr/bin/nvidia-ctk\n    args: [nvidia-ctk, hook, update-ldcache, --folder, /usr/lib]\n  \
     mounts:\n  - {hostPath: /lib/a, containerPath: /lib/a, options: [ro, nosuid, bind]}\ndevices:\n- name: \"0\"\n  containerEdits:\n    \
     deviceNodes:\n    - {path: /dev/nvidia0, hostPath: /dev/null, type: c, major: 195, minor: 0, permissions: rw}\n    additionalGids: [44]\n",
    r#"{"cdiVersion": "0.5.0", "kind": "a.b/c", "devices": [{"name": "all", "containerEdits": {"env": ["X=y"]}}]}"#,
];

const REQUESTS: [&str; 11] = [
    "none",
    "oci",
    "join=1.0",
    "image=/images/tf.sqsh",
    "image=/a.sqsh&mounts=/a%2C/b%3A/c%3Aro%2Bnoexec%2Ctmpfs%3A/t%3Asize%3D5m&env=C%2CA%3Db%2CD%3De%5C%2Cf&device=a.b/c%3Dd&workdir=/w\
     &mount-home=no&writable=5g&remap-root=yes&entrypoint=yes&script=no&stage=bcast&gpu=all&mpi=host&verbose=yes",
    "image=/s/x.sqsh&reference=docker%3A//docker.io/library/ubuntu%3A24.04%40sha256%3A\
     0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef&workdir=/w",
    "reference=oras%3A//me%40ghcr.io%3A443/a/b%40sha256%3A0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "docker://$oauthtoken@nvcr.io/nvidia/pytorch:24.01-py3",
    "me@registry#team/image:1",
    "docker://[::1]:5000/a@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "image=/images/tf%20x.sqsh&digest=sha256%3A0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
];

const HANDOVERS: [&str; 2] = [
    "node=n1&step=1.0&receive=3&send=4&report=5&scancel=/usr/bin/scancel&index=1&config=/etc/m.toml&program=sh&user-namespace=7&alone=\
     &user=alice&home=/home/alice&shell=/bin/sh&groups=100%3Ausers%0A2001%3Aalice",
    "node=n1&step=1.0&receive=3&send=4&report=5&builder=12",
];

const CONFIG: &str = "image_folders = [\"/images\"]\nmounts = [\"/scratch\", \"/sw:/sw:ro\"]\nenv = [\"A=b\", \"C\"]\n\
                      devices = [\"nvidia.com/gpu=all\"]\nwritable = true\ngpu = \"none\"\n\
                      image_store = \"/s/%u\"\nimport = \"node\"\n[registries.\"docker.io\"]\n\
                      mirrors = [\"https://m.org/hub\"]\nplain_http = true\n[policy]\nregistries = [\"a.io\"]\n\
                      repositories = [\"a.io/**\"]\nfolders = [\"/sw\"]\nowners = [\"root\", 5]\n\
                      digests = [\"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"]\n\
                      \0image_folders = []\nstage = \"never\"\n[registries.\"docker.io\"]\nplain_http = false\n\
                      [registries.\"a.io:5000\"]\nca_file = \"/ca\"\n[policy]\nowners = []\n";

const ENVIRONMENTS: [&str; 2] = [
    "image = \"nvcr.io#nvidia/pytorch:24.01-py3\"\nworkdir = \"${HOME}\"\nentrypoint = false\nwritable = true\n\
     mounts = [\"/a\", \"${A}:/b:ro,noexec\", \"/d.sqsh:/d:sqsh\", \"/x$$y:/z\", \"tmpfs:/t:size=5m\"]\n\
     devices = [\"nvidia.com/gpu=all\", \"/dev/fuse:/dev/fuse:rwm\"]\n[env]\nA = \"\"\nB = \"${NOT_SET:-${C:-d}}\"\n\
     [annotations]\ncom.hooks.cxi.enabled = \"true\"\n\"com.hooks.ssh.enabled\" = \"false\"\n\
     [annotations.com.hooks.aws_ofi_nccl]\nenabled = true\nvariant = \"cuda12\"\n",
    "base_environment = [\"a\", './b.toml']\nimage = '''/images/x.sqsh'''\nenv = { A = 'x, y', B = \"\\u00e9\" }\n",
];

const OPTIONS: &str =
    "/a,/b:/c:ro+noexec,tmpfs:/t:size=5m\0C,A=b,D=e\\,f\0nvidia.com/gpu=0,a.b/c=d\0always\0pid,ipc\x00512m";

const ORDER: &str = "mizzen slurm 4\0srun\0/home/alice\x001:2\x0018\x001024,1024\x002\0srun\0-n2\x002\0program 1:3 1:2 =./a b\0directory - - D=/x\0PATH=/bin\0A=b\0";

#[cfg(test)]
mod tests {
    /// A fuzzer that starts from what its parser refuses at once never gets far.
    #[test]
    fn every_parser_takes_its_seeds() {
        for (name, parser) in crate::targets::all() {
            for (number, seed) in super::of(name).unwrap().iter().enumerate() {
                assert!(parser(seed), "seed {number} of {name} is refused");
            }
        }
    }
}
