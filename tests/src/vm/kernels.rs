//! `make test-kernels`: containers on the kernels of Debian and Ubuntu, each with the Slurm of its distribution.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::checks::{Check, fails, images, judge, prints, starts_of_an_image_from_the_network};
use super::kernel::Kernel;
use super::qemu::{Accelerator, Qemu};
use super::{Architecture, Script, Vm};
use crate::images::packed_once;
use crate::release::ubuntu_rootfs;
use crate::{Release, User, target_dir};

/// What a kernel can do of what matters to containers, as far as Debian's differ in it.
struct Abilities {
    /// Users have overlays (Linux 5.11).
    overlays: bool,
    /// Files of a tmpfs have user xattrs (Linux 6.6), so changes are kept in memory.
    changes_in_memory: bool,
}

/// A distribution whose kernel and Slurm a machine has.
struct Distribution {
    name: &'static str,
    /// Slurm there is configured as this one.
    release: Release,
    is_ubuntu: bool,
}

/// Debian's, oldest first, and an Ubuntu that restricts user namespaces by AppArmor.
fn distributions() -> impl Iterator<Item = Distribution> {
    let debian = |release: Release| Distribution { name: release.debian(), release, is_ubuntu: false };
    let noble = Distribution { name: "noble", release: Release::Slurm22_05, is_ubuntu: true };
    Release::ALL.into_iter().map(debian).chain([noble])
}

impl Distribution {
    fn rootfs(&self) -> Result<PathBuf> {
        if self.is_ubuntu { ubuntu_rootfs(self.name) } else { self.release.rootfs() }
    }

    fn kernel(&self) -> Result<Kernel> {
        if self.is_ubuntu {
            Kernel::of_ubuntu(self.name)
        } else {
            Kernel::of(self.name, Architecture::X86_64)
        }
    }
}

/// Boots every kernel, or the one of this distribution, and prints what works.
pub fn test(only: Option<&str>) -> Result<()> {
    let qemu = Qemu::obtain().context("cannot obtain QEMU")?;
    let images = images("kernels", None)?;
    let mut accelerator = None;
    let mut failed = Vec::new();
    let wanted: Vec<_> = distributions().filter(|one| only.is_none_or(|name| name == one.name)).collect();
    ensure!(!wanted.is_empty(), "no such kernel: {}", only.unwrap_or_default());
    for distribution in wanted {
        let rootfs = distribution.rootfs()?;
        packed_once(&rootfs)?;
        let kernel = distribution.kernel()?;
        let can = abilities(&kernel.version)?;
        let mut checks = if distribution.is_ubuntu { under_apparmor() } else { Vec::new() };
        checks.extend(checks_of(&can));
        let vm = Vm {
            name: format!("kernel-{}", distribution.name),
            architecture: Architecture::X86_64,
            kernel,
            release: distribution.release,
            rootfs: (rootfs.clone(), rootfs.with_extension("sqsh")),
            product: target_dir().join("stage").canonicalize().context("run `make stage`")?,
            files: images.clone(),
        };
        let begin = Instant::now();
        let scripts: Vec<Script> = checks.iter().map(Check::to_script).collect();
        let results = vm.run(&qemu, accelerator, &scripts)?;
        accelerator = Some(results.accelerator);
        let how = match results.accelerator {
            Accelerator::Kvm => "by KVM",
            Accelerator::Tcg => "emulated",
        };
        eprintln!(
            "Linux {} ({}), {how}, {:.0} s:",
            results.kernel,
            distribution.name,
            begin.elapsed().as_secs_f32()
        );
        if let Err(error) = judge(&checks, &results) {
            eprintln!("{error:#}\n");
            failed.push(results.kernel);
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        some => bail!("not as it must be on Linux {}", some.join(", ")),
    }
}

/// From the version of a kernel, `6.1.0-50-amd64` for example.
fn abilities(version: &str) -> Result<Abilities> {
    let mut numbers = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = numbers.next().zip(numbers.next()).with_context(|| format!("no version: {version}"))?;
    Ok(Abilities { overlays: version >= (5, 11), changes_in_memory: version >= (6, 6) })
}

const NO_OVERLAY: &[&str] = &[
    "--writable: cannot mount an overlay: Operation not permitted\n",
    "hint: overlays in user namespaces need Linux 5.11; run without --writable\n",
];
const NO_NAME: &[&str] = &[
    "mizzen: a named container: cannot mount an overlay: Operation not permitted\n",
    "mizzen: hint: overlays in user namespaces need Linux 5.11; run without a name here\n",
];
const RESTRICTED: &[&str] = &[
    "AppArmor restricts them (sysctl kernel.apparmor_restrict_unprivileged_userns = 1); mizzen needs a profile with the rule `userns,`\n",
];
const HEALTHY: &str = "containers can run here\n";
/// Linux 5.10.
const WITHOUT_OVERLAYS: &str =
    "missing  overlay         cannot mount overlay: Operation not permitted (for --writable)
missing  mount_setattr   Function not implemented (for one call instead of many per mount)
containers can run here
";
const ON_DISK: &[&str] = &["mizzen: note: changes are kept in /local/mizzen-"];

const WRITABLE: &str = "TMPDIR=/local mizzen run --writable /images/bb.sqsh sh -c 'rm /image; echo new > /etc/new; cat /etc/new'";
const NAMED: &str = "mizzen run --name dev /images/bb.sqsh sh -c 'echo once >> /etc/new; cat /etc/new'";
const SAVED: &str = "TMPDIR=/local mizzen run --writable --save new.sqsh /images/bb.sqsh sh -c 'echo saved > /image' 2>/dev/null && mizzen run new.sqsh cat /image";
/// Two programs in one container. The file server of the first is killed, and that of the second goes on.
const SERVER_KILLED: &str = "mizzen run --name two /images/bb.sqsh sh -c 'touch /tmp/first; until [ -e /tmp/end ]; do sleep 0.1; done' & \
     until [ -e /tmp/first ]; do sleep 0.1; done; sleep 1; \
     mizzen run --name two /images/bb.sqsh sh -c 'touch /tmp/second; until [ -e /tmp/third ]; do sleep 0.1; done; md5sum /bin/busybox >/dev/null; cat /image; echo read' & \
     until [ -e /tmp/second ]; do sleep 0.1; done; sleep 1; pkill -KILL -o -x mizzen-fuse; sleep 1; touch /tmp/third; wait $!; touch /tmp/end; wait; \
     rm /tmp/first /tmp/second /tmp/third /tmp/end; mizzen containers remove two >/dev/null";
/// The same with a second container on the files of the first one.
const BESIDE: &str = "mizzen run --name two /images/bb.sqsh sh -c 'echo one > /first; touch /tmp/first; until [ -e /tmp/end ]; do sleep 0.1; done; cat /second' & \
     until [ -e /tmp/first ]; do sleep 0.1; done; sleep 1; \
     mizzen run --name two:no_exec --remap-root -m /images:/mnt/own - sh -c 'id -u; cat /first; ls /mnt/own/bb.sqsh; echo two > /second; touch /tmp/second; \
       until [ -e /tmp/third ]; do sleep 0.1; done; md5sum /bin/busybox >/dev/null; cat /image; echo read' & \
     until [ -e /tmp/second ]; do sleep 0.1; done; sleep 1; pkill -KILL -o -x mizzen-fuse; sleep 1; touch /tmp/third; wait $!; touch /tmp/end; wait; \
     rm /tmp/first /tmp/second /tmp/third /tmp/end; mizzen containers remove two >/dev/null";
const READ_ONLY: &str =
    "sh -c 'id -un; cat /image /mnt/a; touch /x || echo read-only; touch /mnt/y || echo read-only'";

/// AppArmor restricts user namespaces, as it does there since 23.10: they are refused, or, with a profile that Ubuntu loads at boot, are
/// made and give no rights. The profile that comes with mizzen lifts both, for what follows.
fn under_apparmor() -> Vec<Check> {
    const RUN: &str = "mizzen run /images/bb.sqsh cat /image";
    let root = |check: Check| Check { user: User::Root, ..check };
    vec![
        root(prints(
            "AppArmor restricts user namespaces",
            "echo 1 > /proc/sys/kernel/apparmor_restrict_unprivileged_userns; cat /sys/module/apparmor/parameters/enabled",
            "Y\n",
        )),
        fails("without a profile: refused", RUN, 125, RESTRICTED),
        root(prints(
            "Ubuntu's profile for such namespaces",
            "apparmor_parser -r /etc/apparmor.d/unprivileged_userns",
            "",
        )),
        fails("with Ubuntu's profile: refused", RUN, 125, RESTRICTED),
        root(prints("the profile of mizzen", "apparmor_parser -r /usr/share/mizzen/apparmor/mizzen", "")),
        prints(
            "with the profile of mizzen",
            format!("{RUN}; cat /proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
            "bb\n1\n",
        ),
    ]
}

fn checks_of(can: &Abilities) -> Vec<Check> {
    let mut all = vec![
        prints(
            "squashfs image, read-only mount",
            read_only("/images/bb.sqsh"),
            "alice\nbb\na\nread-only\nread-only\n",
        )
        .noting(&["touch: /x: Read-only file system\n", "touch: /mnt/y: Read-only file system\n"]),
        prints(
            "directory image without mount points",
            read_only("/images/tree"),
            "alice\nbb\na\nread-only\nread-only\n",
        )
        .noting(&["touch: /x: Read-only file system\n", "touch: /mnt/y: Read-only file system\n"]),
        prints(
            "staged copy",
            "mizzen run --stage always /images/bb.sqsh cat /image; mizzen cache list --json | grep -c path",
            "bb\n1\n",
        ),
        prints(
            "namespaces",
            "mizzen run --unshare pid,ipc,net,uts /images/bb.sqsh sh -c 'ip -o link | wc -l; ls /dev/mqueue | wc -l'",
            "1\n0\n",
        ),
        prints(
            "root inside",
            "mizzen run --remap-root /images/bb.sqsh sh -c 'id -u; touch /tmp/f; chown 7:7 /tmp/f; echo $?; rm /tmp/f'",
            "0\n0\n",
        ),
        prints(
            "ranks of one launch share a container",
            "for i in 1 2 3; do mizzen run --share=x /images/bb.sqsh sh -c 'readlink /proc/self/ns/mnt; sleep 4' & done | sort -u | wc -l; wait",
            "1\n",
        ),
    ];
    all.extend(starts_of_an_image_from_the_network(can.overlays));
    all.push(prints(
        "doctor",
        "mizzen doctor | grep -v -e ^ok -e hint:",
        if can.overlays { HEALTHY } else { WITHOUT_OVERLAYS },
    ));
    if can.overlays {
        let writable = prints("writable", WRITABLE, "new\n");
        all.push(if can.changes_in_memory { writable } else { writable.noting(ON_DISK) });
        all.push(prints("named container", "for i in 1 2; do mizzen run --name dev /images/bb.sqsh sh -c 'echo once >> /etc/new'; done; mizzen run --name dev /images/bb.sqsh cat /etc/new; mizzen containers remove dev", "once\nonce\ndev: removed\n"));
        all.push(prints("saved", SAVED, "saved\n"));
        all.push(prints("another file server goes on with a named container", SERVER_KILLED, "bb\nread\n"));
        let beside = "0\none\n/mnt/own/bb.sqsh\nbb\nread\ntwo\n";
        all.push(prints("a second container on the files of one that runs", BESIDE, beside));
    } else {
        all.push(fails("writable: refused with a hint", WRITABLE, 125, NO_OVERLAY));
        all.push(fails("named container: refused with a hint", NAMED, 125, NO_NAME));
    }
    all.extend([
        prints("srun --container, four tasks in one container", "srun -Q -n4 --container=/images/bb.sqsh sh -c 'cat /image; id -G; readlink /proc/self/ns/mnt' > out; grep -v mnt out | sort -u; grep mnt out | sort -u | wc -l", "2001 2100 2101\nbb\n1\n"),
        prints("srun with an image that is a directory", "srun -Q --container=/images/tree cat /image", "bb\n"),
        prints("a batch script inside, with Slurm's commands", "printf '#!/bin/sh\\nsqueue --noheader --format=%%u\\nsrun -Q cat /image\\n' > job.sh; sbatch -Q --wait --output=out --container=/images/bb.sqsh job.sh; cat out", "alice\nbb\n"),
        fails("no such program", "srun -Q --container=/images/bb.sqsh nosuch", 127, &["mizzen: node1: nosuch: no such program in the container\n"]),
        fails("a damaged image ends the step, and nothing runs outside", "head -c 5000 /images/bb.sqsh > bad.sqsh; srun -Q --container=$PWD/bad.sqsh touch /tmp/marker; code=$?; ls /tmp/marker 2>/dev/null; exit $code", 125, &["bad.sqsh"]),
        prints("nothing is left", "sleep 2; pgrep -l mizzen; grep -c mizzen /proc/self/mountinfo; ls -d /local/mizzen-?????? 2>/dev/null; sinfo --noheader --format=%T", "0\nidle\n"),
    ]);
    all
}

fn read_only(image: &str) -> String {
    format!("mkdir -p /tmp/data; echo a > /tmp/data/a; mizzen run -m /tmp/data:/mnt:ro {image} {READ_ONLY}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_version_tells_what_a_kernel_can_do() {
        let can = |version: &str| {
            let can = super::abilities(version).unwrap();
            (can.overlays, can.changes_in_memory)
        };
        assert_eq!(can("5.10.0-32-amd64"), (false, false));
        assert_eq!(can("6.1.0-50-amd64"), (true, false));
        assert_eq!(can("6.8.0-149-generic"), (true, true));
        assert_eq!(can("6.12.107+deb13-amd64"), (true, true));
        assert_eq!(can("7.2.12+deb14-amd64"), (true, true));
        assert!(super::abilities("next").is_err());
    }
}
