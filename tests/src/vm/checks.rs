//! What is run on a virtual machine, and what must come out.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use super::{Results, Script};
use crate::images::ImageTree;
use crate::{User, run_tool, target_dir};

/// What a command must give.
pub struct Expected {
    /// The exit code.
    pub code: i32,
    /// Everything on stdout.
    pub stdout: &'static str,
    /// Parts of what it prints on stderr, each of them once. Without any, it prints nothing there.
    pub stderr: &'static [&'static str],
}

/// A command of a machine and what must come out.
pub struct Check {
    /// What is checked.
    pub name: &'static str,
    /// Who runs it.
    pub user: User,
    /// What is run.
    pub script: String,
    /// What must come out.
    pub expected: Expected,
}

/// A command of Alice's that succeeds.
pub fn prints(name: &'static str, script: impl Into<String>, stdout: &'static str) -> Check {
    let expected = Expected { code: 0, stdout, stderr: &[] };
    Check { name, user: User::Alice, script: script.into(), expected }
}

/// A command of Alice's that fails with a message and prints nothing else.
pub fn fails(
    name: &'static str,
    script: impl Into<String>,
    code: i32,
    stderr: &'static [&'static str],
) -> Check {
    let expected = Expected { code, stdout: "", stderr };
    Check { name, user: User::Alice, script: script.into(), expected }
}

impl Check {
    /// The same with something on stderr.
    pub fn noting(self, stderr: &'static [&'static str]) -> Check {
        Check { expected: Expected { stderr, ..self.expected }, ..self }
    }

    /// The command.
    pub fn to_script(&self) -> Script {
        Script { name: self.name, user: self.user, script: self.script.clone() }
    }
}

/// Prints a table of the results, and fails if one is not as it must be.
pub fn judge(checks: &[Check], results: &Results) -> Result<()> {
    let mut wrong = Vec::new();
    for (check, (output, took)) in checks.iter().zip(&results.outputs) {
        let Expected { code, stdout, stderr } = &check.expected;
        let said = match stderr {
            [] => output.stderr.is_empty(),
            parts => parts.iter().all(|part| output.stderr.matches(part).count() == 1),
        };
        let right = output.code == *code && output.stdout == *stdout && said;
        eprintln!(
            "  {:<7} {:>6.1} s  {}",
            if right { "ok" } else { "WRONG" },
            took.as_secs_f32(),
            check.name
        );
        if !right {
            wrong.push(format!(
                "{}: {}\nexpected: exit code {code}, {stdout:?}, on stderr {stderr:?}\n{}",
                check.name,
                check.script,
                output.text()
            ));
        }
    }
    if !wrong.is_empty() {
        bail!("{}\n--- slurmd's log\n{}", wrong.join("\n\n"), results.slurmd_log);
    }
    Ok(())
}

/// Three starts of an image on a network file system: while it is copied, from the copy, and, where users have overlays, with what the
/// first has read unpacked over it. Elsewhere it is not unpacked.
pub fn starts_of_an_image_from_the_network(overlays: bool) -> [Check; 2] {
    const IMAGE: &str = "/network/start.sqsh sh -c";
    const READ: &str = "grep -o lowerdir=/places[^,]* /proc/self/mountinfo; cd /data; md5sum -c sum";
    // A start that goes on until this is there.
    let until = |options: &str, name: &str| {
        format!(
            "mizzen run {options} {IMAGE} '{READ}; until [ -e ~/go ]; do sleep 0.1; done' & \
             for i in $(seq 600); do ls /local/mizzen-2001/{name} > /dev/null 2>&1 && break; sleep 0.1; done; touch go; wait $!; rm go"
        )
    };
    let (without_layer, made, later, with_layer) = if overlays {
        (
            "lowerdir=/places:/image\nlarge: OK\n",
            "unpacked-*/manifest",
            "a later start finds its files unpacked",
            "lowerdir=/places:/unpacked-0:/image\nlarge: OK\nunpacked-\n",
        )
    } else {
        ("large: OK\n", "profile-*.skip", "what no start could use is not unpacked", "large: OK\n")
    };
    let read_through =
        prints("an image is used while it is copied", until("--verbose", "profile-*"), without_layer);
    let from_the_copy = until("", made);
    let rest = format!(
        "mizzen stage /network/start.sqsh > /dev/null 2>&1; {{ {from_the_copy}; }} > second; mizzen run {IMAGE} '{READ}'; \
         ls /local/mizzen-2001 | grep -o ^unpack[a-z]*- || true"
    );
    [
        read_through.noting(&["mizzen: note: /network/start.sqsh: ", " from the copy on the node, "]),
        prints(later, rest, with_layer),
    ]
}

/// The images of a machine: `/images/bb.sqsh`, the same as a directory that lacks mount points, and `start.sqsh`, with enough in
/// `/data` to be worth unpacking. `busybox` is for its processor.
pub fn images(name: &str, busybox: Option<PathBuf>) -> Result<Vec<(String, PathBuf)>> {
    let directory = target_dir().join("vm/images").join(name);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    let tree = ImageTree::busybox()?;
    if let Some(busybox) = busybox {
        fs::copy(busybox, tree.path("bin/busybox"))?;
    }
    tree.file("image", "bb\n")?;
    let image = directory.join("bb.sqsh");
    fs::write(&image, tree.squashfs(&["-comp", "zstd"])?)?;
    let unpacked = directory.join("tree");
    fs::create_dir_all(unpacked.join("proc"))?;
    for name in ["bin", "etc", "image"] {
        run_tool(Command::new("cp").arg("-a").arg(tree.path(name)).arg(unpacked.join(name)))?;
    }
    let line = "what a program reads when it starts\n";
    tree.file("data/large", &line.repeat((20 << 20) / line.len()))?;
    let sum = run_tool(Command::new("md5sum").arg("large").current_dir(tree.path("data")))?;
    tree.file("data/sum", &sum)?;
    let start = directory.join("start.sqsh");
    fs::write(&start, tree.squashfs(&["-comp", "zstd"])?)?;
    Ok(vec![
        ("images/bb.sqsh".to_owned(), image),
        ("images/tree".to_owned(), unpacked),
        ("images/start.sqsh".to_owned(), start),
    ])
}
