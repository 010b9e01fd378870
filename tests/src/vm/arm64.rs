//! `make test-arm64`: the product for 64-bit ARM, on an emulated machine with Debian's kernel and Slurm.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::checks::{Check, fails, images, judge, prints, starts_of_an_image_from_the_network};
use super::kernel::Kernel;
use super::qemu::Qemu;
use super::{Architecture, Script, Vm};
use crate::images::packed_once;
use crate::release::foreign_rootfs;
use crate::{Release, User};

/// The Slurm and the kernel of Debian trixie.
const RELEASE: Release = Release::Slurm24_11;

/// `words`: the directory of the installed product, and test programs that are run there.
pub fn test(words: &[&str]) -> Result<()> {
    let [product, tests @ ..] = words else { bail!("the directory of the product is missing") };
    let qemu = Qemu::obtain().context("cannot obtain QEMU")?;
    let rootfs = foreign_rootfs(RELEASE, Architecture::Aarch64.debian())?;
    packed_once(&rootfs)?;
    let kernel = Kernel::of(RELEASE.debian(), Architecture::Aarch64)?;
    let mut files = images("arm64", Some(kernel.busybox()?))?;
    // One that was made for the machine on which this runs.
    let own = images("arm64-foreign", None)?;
    files.extend(
        own.into_iter()
            .filter(|(name, _)| name == "images/bb.sqsh")
            .map(|(_, file)| ("images/amd64.sqsh".to_owned(), file)),
    );
    let mut checks = checks();
    for test in tests {
        let path = Path::new(test);
        let name = path.file_name().and_then(|name| name.to_str()).context("a test has no name")?;
        let on_machine = ON_MACHINE.iter().find(|tests| name.starts_with(tests.program));
        if !matches!(on_machine, Some(UnitTests { only: "", .. })) {
            run_translated(&qemu, test, on_machine)?;
        }
        if let Some(tests) = on_machine {
            files.push((format!("tests/{name}"), PathBuf::from(test)));
            checks.push(tests.check(name));
        }
    }
    let vm = Vm {
        name: "arm64".to_owned(),
        architecture: Architecture::Aarch64,
        kernel,
        release: RELEASE,
        rootfs: (rootfs.clone(), rootfs.with_extension("sqsh")),
        product: Path::new(product).canonicalize().with_context(|| (*product).to_owned())?,
        files,
    };
    let scripts: Vec<Script> = checks.iter().map(Check::to_script).collect();
    let results = vm.run(&qemu, None, &scripts)?;
    let took = results.took.as_secs_f32();
    eprintln!("Linux {} ({}, {RELEASE}), emulated, {took:.0} s:", results.kernel, RELEASE.debian());
    judge(&checks, &results)
}

/// Tests that are not translated, but run on the machine.
struct UnitTests {
    /// Begins the name of their program.
    program: &'static str,
    /// Begins their own names.
    only: &'static str,
    /// Why there.
    name: &'static str,
}

const ON_MACHINE: [UnitTests; 3] = [
    UnitTests {
        program: "filter-",
        only: "",
        name: "tests of the file server's filter, which need a kernel",
    },
    UnitTests { program: "mizzen-", only: "elf::", name: "tests that read the machine's libraries" },
    UnitTests { program: "mizzen_import-", only: "store::", name: "tests that start themselves again" },
];

impl UnitTests {
    fn check(&self, program: &str) -> Check {
        let script = format!(
            "cd /tmp && /tests/{program} {} > log 2>&1 || {{ cat log >&2; exit 1; }}; rm log",
            self.only
        );
        Check { user: User::Root, ..prints(self.name, script, "") }
    }
}

/// Runs a program of tests that needs the processor alone, but for those that run on the machine. (Containers cannot be made so: QEMU's
/// own thread is in the process, and the kernel gives a user namespace only to a process with one thread.)
fn run_translated(qemu: &Qemu, program: &str, on_machine: Option<&UnitTests>) -> Result<()> {
    let begin = Instant::now();
    let mut command = qemu.user_program(Architecture::Aarch64);
    command.arg(program).arg("--test-threads=2");
    if let Some(tests) = on_machine {
        command.args(["--skip", tests.only]);
    }
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{command:?} failed ({}): {printed}", output.status);
    let result = printed.lines().find(|line| line.starts_with("test result: ok.")).context("no result")?;
    let name = Path::new(program).file_name().unwrap_or_default();
    eprintln!("{}: {result} ({:.0} s)", name.display(), begin.elapsed().as_secs_f32());
    Ok(())
}

fn checks() -> Vec<Check> {
    let mut all = vec![
        prints(
            "the launcher",
            "mizzen run /images/bb.sqsh sh -c 'cat /image; uname -m; id -un'",
            "bb\naarch64\nalice\n",
        ),
        prints("a directory", "mizzen run /images/tree cat /image", "bb\n"),
        prints("doctor", "mizzen doctor | grep -vE '^ok' ", "containers can run here\n"),
        prints(
            "the file server has its filter",
            "mizzen run /images/bb.sqsh sh -c 'touch /tmp/up; until [ -e /tmp/end ]; do sleep 0.1; done; md5sum /bin/busybox > /dev/null; echo read' & \
             until [ -e /tmp/up ]; do sleep 0.1; done; sleep 1; \
             for i in $(pgrep -x mizzen-fuse); do grep -h Seccomp: /proc/$i/task/*/status; done | sort -u; touch /tmp/end; wait; rm /tmp/up /tmp/end",
            "Seccomp:\t2\nread\n",
        ),
        prints(
            "root's calls appear to succeed",
            "mizzen run --remap-root --writable /images/bb.sqsh sh -c 'id -u; touch /f; chown 7:7 /f; echo $?; chown -h 7:7 /f; echo $?; \
             mknod /dev1 c 1 3; echo $?; mkfifo /p; stat -c %F /p; grep Seccomp: /proc/self/status'",
            "0\n0\n0\n0\nfifo\nSeccomp:\t2\n",
        ),
        prints(
            "writable",
            "mizzen run --writable /images/bb.sqsh sh -c 'rm /image; echo new > /etc/new; cat /etc/new'",
            "new\n",
        ),
        prints(
            "named container",
            "for i in 1 2; do mizzen run --name dev /images/bb.sqsh sh -c 'echo once >> /etc/new'; done; mizzen run --name dev /images/bb.sqsh cat /etc/new; mizzen containers remove dev",
            "once\nonce\ndev: removed\n",
        ),
        prints(
            "saved",
            "mizzen run --writable --save new.sqsh /images/bb.sqsh sh -c 'echo saved > /image' 2>/dev/null && mizzen run new.sqsh cat /image",
            "saved\n",
        ),
        prints(
            "namespaces",
            "mizzen run --unshare pid,ipc,net,uts /images/bb.sqsh sh -c 'ip -o link | wc -l'",
            "1\n",
        ),
        prints("staged copy", "mizzen run --stage always /images/bb.sqsh cat /image", "bb\n"),
        prints(
            "imported from a directory",
            "mizzen import -o made.sqsh /images/tree >/dev/null 2>&1; mizzen run $PWD/made.sqsh cat /image",
            "bb\n",
        ),
        prints("the plugin has its options", "srun --help | grep -c -- --container-image", "1\n"),
        prints(
            "srun --container, four tasks",
            "srun -Q -n4 --container=/images/bb.sqsh sh -c 'cat /image; uname -m; id -G; readlink /proc/self/ns/mnt' > out; grep -v mnt out | sort -u; grep mnt out | sort -u | wc -l",
            "2001 2100 2101\naarch64\nbb\n1\n",
        ),
        prints(
            "a batch script inside, with Slurm's commands",
            "printf '#!/bin/sh\\nsqueue --noheader --format=%%u\\nsrun -Q cat /image\\n' > job.sh; sbatch -Q --wait --output=out --container=/images/bb.sqsh job.sh; cat out",
            "alice\nbb\n",
        ),
        fails(
            "an image that is missing",
            "srun -Q --container=/images/no.sqsh touch /tmp/marker; code=$?; ls /tmp/marker 2>/dev/null; exit $code",
            1,
            &["mizzen: --container: no such image; tried /images/no.sqsh\n"],
        ),
        fails(
            "a bad option",
            "srun -Q --container=/images/bb.sqsh --container-mounts=x touch /tmp/marker; code=$?; ls /tmp/marker 2>/dev/null; exit $code",
            125,
            &["mizzen: node1: --container-mounts: source path does not exist: /home/alice/x\n"],
        ),
        fails(
            "a damaged image",
            "head -c 5000 /images/bb.sqsh > bad.sqsh; srun -Q --container=$PWD/bad.sqsh touch /tmp/marker; code=$?; ls /tmp/marker 2>/dev/null; exit $code",
            125,
            &["bad.sqsh: truncated: "],
        ),
        fails(
            "an image for x86_64: mizzen run",
            "mizzen run /images/amd64.sqsh true",
            126,
            &[
                "mizzen: /bin/true: made for x86_64, this node is aarch64\n",
                "mizzen: hint: choose nodes of that kind",
            ],
        ),
        fails(
            "an image for x86_64: srun",
            "srun -Q --container=/images/amd64.sqsh touch /tmp/marker; code=$?; ls /tmp/marker 2>/dev/null; exit $code",
            126,
            &["mizzen: node1: /bin/touch: made for x86_64, this node is aarch64\n"],
        ),
        prints(
            "nothing is left",
            "sleep 2; pgrep -l mizzen; grep -c mizzen /proc/self/mountinfo; sinfo --noheader --format=%T",
            "0\nidle\n",
        ),
    ];
    let last = all.len() - 1;
    all.splice(last..last, starts_of_an_image_from_the_network(true));
    all
}
