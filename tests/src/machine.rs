//! One machine of a cluster: its own network, mounts and host name, a Debian root, and Slurm's daemons.

use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Pid, chdir, pivot_root, sethostname};

use crate::init::Order;
use crate::spec::{GROUP, PASSWD, SharedFs};
use crate::{cgroup, run_tool};

/// Becomes the machine `name`; ends with the cluster.
pub fn run(name: &str, supervisor: u32) -> Result<()> {
    match bring_up(name, supervisor) {
        Ok(daemons) => {
            writeln!(std::io::stdout(), "running")?;
            for mut daemon in daemons {
                daemon.wait()?;
            }
            // A test may stop a daemon and start it again: the machine itself stays.
            loop {
                std::thread::park();
            }
        }
        Err(error) => {
            writeln!(std::io::stdout(), "{error:#}")?;
            Ok(())
        }
    }
}

fn bring_up(name: &str, supervisor: u32) -> Result<Vec<Child>> {
    let mut orders = std::io::stdin().lock().lines();
    let order: Order = serde_json::from_str(&orders.next().context("no order")??)?;
    if order.spec.cgroup_v1 {
        cgroup::enter(supervisor, name)?;
    }
    if order.spec.one_cpu {
        let mut first = CpuSet::new();
        first.set(0)?;
        sched_setaffinity(Pid::from_raw(0), &first).context("sched_setaffinity")?;
    }
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC,
    )
    .context("unshare")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    writeln!(std::io::stdout(), "namespaces")?;
    let address = orders.next().context("no address")??;
    sethostname(name)?;
    for words in [
        "link set lo up".to_owned(),
        format!("addr add {address}/16 dev eth0"),
        "link set eth0 up".to_owned(),
    ] {
        run_tool(Command::new("ip").args(words.split_whitespace()))?;
    }
    let root = make_root(name, &order).with_context(|| format!("cannot make the root of {name}"))?;
    chdir(&root)?;
    fs::create_dir("old-root")?;
    pivot_root(".", "old-root").context("pivot_root")?;
    umount2("/old-root", MntFlags::MNT_DETACH)?;
    fs::remove_dir("/old-root")?;
    if order.spec.shared == SharedFs::Fuse {
        run_tool(Command::new("bindfs").args(["-o", "allow_other", "/run/shared-backing", "/shared"]))?;
    }
    start_daemons(name, order.spec.configless)
}

/// Overlays the product on the release's root file system and mounts what a booted machine has.
fn make_root(name: &str, order: &Order) -> Result<PathBuf> {
    let shared = order.dir.join("fs");
    let own = shared.join(format!("machine-{name}"));
    for dir in ["upper", "work", "root"] {
        fs::create_dir_all(own.join(dir))?;
    }
    let root = own.join("root");
    let lower: Vec<String> =
        order.spec.layers.iter().chain([&order.rootfs]).map(|p| p.display().to_string()).collect();
    let data = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.join(":"),
        own.join("upper").display(),
        own.join("work").display()
    );
    mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(data.as_str()))
        .with_context(|| format!("overlay {data}"))?;
    mount_kernel_file_systems(&root, &order.spec.devices)?;
    if order.spec.cgroup_v1 {
        cgroup::mount_in(&root)?;
    }
    for (dir, options) in [("tmp", "mode=1777"), ("run", "mode=755"), ("local", "mode=1777")] {
        fs::create_dir_all(root.join(dir))?;
        mount(Some("tmpfs"), &root.join(dir), Some("tmpfs"), MsFlags::empty(), Some(options))?;
    }
    let shared_dir = if order.spec.shared == SharedFs::Fuse { "run/shared-backing" } else { "shared" };
    if order.spec.own_etc_slurm {
        copy_slurm_files(&shared.join("etc-slurm"), &root.join("etc/slurm"))?;
    } else if !order.spec.configless || name == "ctl" {
        bind(&shared.join("etc-slurm"), &root.join("etc/slurm"))?;
    }
    for (source, place) in [
        (shared.join("home"), "home"),
        (shared.join("run-munge"), "run/munge"),
        (shared.join("shared"), shared_dir),
        (order.dir.join("logs"), "var/log/slurm"),
    ] {
        bind(&source, &root.join(place))?;
    }
    fs::create_dir_all(root.join("shared"))?;
    for spool in ["slurmd", "slurmctld"] {
        fs::create_dir_all(root.join("var/spool").join(spool))?;
    }
    append(&root.join("etc/passwd"), PASSWD)?;
    append(&root.join("etc/group"), GROUP)?;
    fs::write(root.join("etc/hosts"), order.spec.hosts())?;
    fs::write(root.join("etc/hostname"), format!("{name}\n"))?;
    if let Some(text) = &order.spec.mizzen_toml {
        fs::create_dir_all(root.join("etc/mizzen"))?;
        fs::write(root.join("etc/mizzen/mizzen.toml"), text)?;
    }
    Ok(root)
}

/// All but plugstack.conf, which is as Slurm's packages have it.
fn copy_slurm_files(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let (file, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        if name != "plugstack.conf" {
            fs::copy(file, to.join(name))?;
        }
    }
    Ok(())
}

/// What every machine has in /dev where it does not come from the kernel's devtmpfs.
const USUAL_DEVICES: [&str; 7] = ["full", "fuse", "null", "random", "tty", "urandom", "zero"];

fn mount_kernel_file_systems(root: &Path, devices: &[(String, u64, u64)]) -> Result<()> {
    for (kind, place) in [("proc", "proc"), ("sysfs", "sys"), ("devtmpfs", "dev")] {
        mount(Some(kind), &root.join(place), Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {kind}"))?;
    }
    if !devices.is_empty() {
        own_devices(root, devices)?;
    }
    // devtmpfs is one for the whole kernel: what differs on a cluster node goes on top of it.
    for (kind, place, options) in [
        ("tmpfs", "dev/shm", "mode=1777"),
        ("devpts", "dev/pts", "newinstance,ptmxmode=0666,mode=620,gid=5"),
        ("mqueue", "dev/mqueue", ""),
    ] {
        fs::create_dir_all(root.join(place))?;
        mount(Some(kind), &root.join(place), Some(kind), MsFlags::empty(), Some(options))
            .with_context(|| format!("cannot mount {kind}"))?;
    }
    if !root.join("dev/ptmx").exists() {
        File::create(root.join("dev/ptmx"))?;
    }
    bind(&root.join("dev/pts/ptmx"), &root.join("dev/ptmx"))?;
    // On a bare machine /dev/fuse is 0600 until udev makes it 0666, as it is on every cluster.
    let fuse = root.join("var/fuse-node");
    mknod(&fuse, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(10, 229)).context("mknod fuse")?;
    fs::set_permissions(&fuse, fs::Permissions::from_mode(0o666))?;
    bind(&fuse, &root.join("dev/fuse"))?;
    for (link, to) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        let link = root.join("dev").join(link);
        if !link.is_symlink() {
            symlink(to, link)?;
        }
    }
    Ok(())
}

/// A /dev of the machine's own, with the usual nodes and further ones.
fn own_devices(root: &Path, devices: &[(String, u64, u64)]) -> Result<()> {
    let dev = root.join("dev");
    let usual: Vec<(String, u64)> = USUAL_DEVICES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), fs::metadata(dev.join(name)).ok()?.rdev())))
        .collect();
    mount(Some("tmpfs"), &dev, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=755"))?;
    let further = devices.iter().map(|(name, major, minor)| (name.clone(), makedev(*major, *minor)));
    for (name, numbers) in usual.into_iter().chain(further) {
        let node = dev.join(&name);
        fs::create_dir_all(node.parent().unwrap_or(&dev))?;
        mknod(&node, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), numbers)
            .with_context(|| format!("mknod /dev/{name}"))?;
        fs::set_permissions(&node, fs::Permissions::from_mode(0o666))?;
    }
    Ok(())
}

fn bind(source: &Path, place: &Path) -> Result<()> {
    if source.is_dir() {
        fs::create_dir_all(place)?;
    }
    mount(Some(source), place, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("cannot bind {} to {}", source.display(), place.display()))
}

fn append(file: &Path, text: &str) -> Result<()> {
    let old = fs::read_to_string(file)?;
    fs::write(file, old + text)?;
    Ok(())
}

fn start_daemons(name: &str, configless: bool) -> Result<Vec<Child>> {
    if name != "ctl" {
        let options: &[&str] = if configless { &["-D", "--conf-server", "ctl"] } else { &["-D"] };
        return Ok(vec![daemon(name, "slurmd", options)?]);
    }
    // One munged for the cluster: its socket is bound into every machine.
    std::os::unix::fs::chown("/run/munge", Some(id_of("munge")?), None)?;
    let munged = daemon(
        name,
        "runuser",
        &["-u", "munge", "--", "/usr/sbin/munged", "--foreground", "--num-threads=4"],
    )?;
    let begin = Instant::now();
    while !Path::new("/run/munge/munge.socket.2").exists() {
        if begin.elapsed() > Duration::from_secs(10) {
            bail!("munged does not start; see munged's lines in ctl-runuser.log");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(vec![munged, daemon(name, "slurmctld", &["-D", "-i"])?])
}

fn id_of(user: &str) -> Result<u32> {
    Ok(run_tool(Command::new("id").args(["-u", user]))?.trim().parse()?)
}

fn daemon(machine: &str, program: &str, args: &[&str]) -> Result<Child> {
    let log = File::create(format!("/var/log/slurm/{machine}-{program}.log"))?;
    Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {program}"))
}
