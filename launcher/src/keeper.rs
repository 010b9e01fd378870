//! The keeper: the only part of this program that runs as root for a user. Slurm's plugin starts it, where the site
//! wants copies of images that all users share, beside the first task of a step and in the same mount namespace.
//!
//! Its other end is the launcher, which is the user's own process and says what the user likes. What it sends is one
//! descriptor of a file, open for reading. The keeper believes nothing about it but what the kernel says: which mount of
//! the keeper's own namespace it lies on, whose it is, and which path it has there. It resolves no path of the user's,
//! parses no image and runs no program. The copy is made by the storekeeper, a process without root's powers; the
//! keeper hands it out, and mounts it if the administrator's limits admit the source.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mizzen_core::config::Source;
use mizzen_core::failure::cause;
use mizzen_core::kernel_mount::SourceFile;
use mizzen_core::{Config, Failure};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_name;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::sockopt::SendTimeout;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, setsockopt, socketpair};
use nix::sys::stat::umask;
use nix::sys::time::{TimeVal, TimeValLike};
use nix::sys::wait::waitpid;
use nix::unistd::{geteuid, getpid};
use rustix::fs::{FileType, Mode, OFlags, fstat, mkdirat, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount, move_mount, unmount,
};

use crate::stage::cache::Cache;
use crate::stage::shared::{MOUNT_COPY, STAGE_AND_MOUNT, VERIFY, Word, receive_bytes};
use crate::stage::{Staging, store};
use crate::{report, sys};

/// The name under which the plugin starts it: `mizzen-keeper SOCKET PROCESS USER own-mounts|node-mounts [CONFIG]`.
pub const NAME: &str = "mizzen-keeper";
/// Says that the plugin has given the step a mount namespace of its own.
const OWN_MOUNTS: &str = "own-mounts";
/// Where a mount of the kernel's is put, in the shared directory.
pub const MOUNT: &str = "mount";
/// A launcher that has not asked by then has been stopped; its step can still be killed.
const PATIENCE_MILLISECONDS: i32 = 3_600_000;
/// The root of a container and what is mounted in it; a launcher tries three times.
const REQUESTS: u32 = 64;
/// A launcher that does not listen for so long is not waited for.
const SEND_SECONDS: i64 = 30;
/// File systems of the kernel's own, whose files may tell a process of root's more than a user.
const PSEUDO: &str = "proc sysfs cgroup cgroup2 debugfs tracefs securityfs selinuxfs smackfs configfs bpf pstore efivarfs fusectl mqueue nsfs \
     binfmt_misc resctrl rpc_pipefs nfsd devpts";

// What <linux/loop.h> names so.
const LOOP_SET_FD: libc::Ioctl = 0x4c00;
const LOOP_CLEAR_FD: libc::Ioctl = 0x4c01;
const LOOP_SET_STATUS64: libc::Ioctl = 0x4c04;
const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;
/// Nobody writes to it, and it goes with its last user.
const READ_ONLY_AUTOCLEAR: u32 = 1 | 4;
/// Somebody else may take the free device first, so often.
const LOOP_ATTEMPTS: u32 = 64;

/// Serves one launcher, and ends with it.
pub fn run() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| words.get(index).and_then(|word| word.parse().ok());
    let may_mount = words.get(3).is_some_and(|word| word == OWN_MOUNTS);
    let (Some(socket), Some(process), Some(user), true) =
        (number(0), number(1), number(2), geteuid().is_root())
    else {
        report(&Failure::new(format!("{NAME} is started by Slurm's plugin, as root")));
        return ExitCode::from(125);
    };
    let _ = set_name(c"mizzen-keeper");
    let config = words.get(4).map_or(Source::Default, |path| Source::Named(path.into()));
    // Whatever goes wrong here, the launcher sees the end of its socket; it has read the same configuration.
    if let (Ok(socket), Ok(config)) = (sys::own_inherited(socket), Config::load(&config))
        && let Ok(user) = u32::try_from(user)
    {
        // Linux before 5.3 has no such descriptors.
        let process = sys::pidfd_of(process).ok();
        Launcher { socket, process, may_mount }.serve(user, &config);
    }
    ExitCode::SUCCESS
}

/// Whom the keeper serves. The launcher's end of the socket may also be in the hands of other processes of the user's, so
/// that its end alone would not tell.
pub struct Launcher {
    pub socket: OwnedFd,
    pub process: Option<OwnedFd>,
    /// Whether it is in a mount namespace of the step's own, in which something can be mounted for it.
    pub may_mount: bool,
}

/// The copy that was given out last, and why it may not be mounted.
struct Given {
    copy: File,
    cache: Cache,
    refusal: Option<String>,
}

impl Launcher {
    /// Answers what comes through the socket until the launcher ends. The process ends after that.
    ///
    /// What was refused is not closed by us. To close a descriptor may mean to wait, for as long as the user likes: for a file
    /// system that is a process of the user's, or for a connection that he has told to linger. The end of a process does not
    /// linger; and what may still wait then must find nothing of value in our hands, such as a copy that could not be
    /// removed, or our own socket, in which what keeps that file system going may lie.
    pub fn serve(self, user: u32, config: &Config) {
        let may_mount = self.may_mount;
        let refused = self.answer_all(user, config);
        if !refused.is_empty() && may_mount {
            // In the step's own namespace. What the launcher has made of it is not touched.
            let _ = unmount(config.stage_shared.join(MOUNT), UnmountFlags::DETACH);
        }
        std::mem::forget(refused);
    }

    /// Returns what it has refused.
    fn answer_all(self, user: u32, config: &Config) -> Vec<OwnedFd> {
        // What it makes, all users see.
        umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
        let _ = setsockopt(&self.socket, SendTimeout, &TimeVal::seconds(SEND_SECONDS));
        let patience = PollTimeout::try_from(PATIENCE_MILLISECONDS).unwrap_or(PollTimeout::MAX);
        let (mut given, mut mounted) = (None::<Given>, false);
        for _ in 0..REQUESTS {
            if !self.waits_for(&self.socket, patience) {
                break;
            }
            let mut request = [0; 2];
            let passed = match sys::receive_descriptors(&self.socket, &mut request, MsgFlags::empty()) {
                Ok((1 | 2, passed)) => passed,
                Ok((_, passed)) => return self.refuse("nothing is asked", false, passed),
                Err(_) => break,
            };
            if request[0] == MOUNT_COPY && passed.is_empty() {
                let nothing = || Word::NotMounted("there is nothing more to mount".to_owned());
                let word = given.take().filter(|_| !mounted).map_or_else(nothing, |given| given.mount(user));
                mounted |= word == Word::Mounted;
                if word.send(&self.socket, None).is_err() {
                    break;
                }
                continue;
            }
            // A container has one root.
            let wish =
                Wish { mounts: request[0] == STAGE_AND_MOUNT && !mounted, verify: request[1] == VERIFY };
            let looked = match passed.as_slice() {
                [source] => look_at(source),
                _ => Err("it does not come alone".to_owned()),
            };
            let (looked, source) = match (looked, passed) {
                (Ok(looked), mut passed) => (looked, passed.pop().map(File::from)),
                (Err(why), passed) => return self.refuse(&why, wish.mounts, passed),
            };
            let Some(source) = source else { break };
            match answer(&self, user, config, wish, &source, looked) {
                Some(copy) => given = copy,
                None => break,
            }
        }
        Vec::new()
    }

    /// Says no to what is not to be touched, and to everything that may come after it.
    fn refuse(&self, why: &str, mounts: bool, passed: Vec<OwnedFd>) -> Vec<OwnedFd> {
        if mounts {
            let _ = Word::NotMounted(why.to_owned()).send(&self.socket, None);
        }
        let _ = Word::NoCopy(why.to_owned()).send(&self.socket, None);
        passed
    }

    /// Waits for something to read. False if the launcher has ended, or the time is over.
    fn waits_for(&self, readable: &OwnedFd, patience: PollTimeout) -> bool {
        loop {
            let mut ends = vec![
                PollFd::new(readable.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.socket.as_fd(), PollFlags::empty()),
            ];
            ends.extend(self.process.iter().map(|process| PollFd::new(process.as_fd(), PollFlags::POLLIN)));
            if poll(&mut ends, patience) != Err(nix::Error::EINTR) {
                let happened = |end: &PollFd| end.any() == Some(true);
                return happened(&ends[0]) && !ends[2..].iter().any(happened);
            }
        }
    }
}

/// What a launcher wants of a copy.
#[derive(Clone, Copy)]
struct Wish {
    /// To have it mounted afterwards.
    mounts: bool,
    /// That it is read first, if it is there already.
    verify: bool,
}

/// Gives out a copy. None if nobody listens any more; the inner None if there is no copy, which the launcher has been told.
fn answer(
    launcher: &Launcher,
    user: u32,
    config: &Config,
    wish: Wish,
    source: &File,
    file: SourceFile,
) -> Option<Option<Given>> {
    let say = |word: Word| word.send(&launcher.socket, None).ok();
    let refusal = if !launcher.may_mount {
        Some("mizzen.toml does not let it".to_owned())
    } else if sys::is_written(source) {
        // From before it was given to its owner, perhaps.
        Some("somebody has it open for writing".to_owned())
    } else {
        config.mount.refusal(&file)
    };
    // Before the copy: where the launcher wants a mount or nothing, there will be nothing.
    if let (true, Some(why)) = (wish.mounts, &refusal) {
        say(Word::NotMounted(why.clone()))?;
    }
    let opened = Cache::open_shared(&config.stage_shared)
        .and_then(|cache| Ok((cache, Staging::new(config.stage, config)?)));
    let (cache, staging) = match opened {
        Ok(opened) => opened,
        Err(failure) => return say(Word::NoCopy(failure.message)).map(|()| None),
    };
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mount = format!("{} {}", boot.trim(), file.mount);
    let order = store::Order { path: &file.path, file: source, mount: &mount, user, verify: wish.verify };
    let copy = stage(launcher, &cache, &order, &staging)?;
    Some(copy.map(|copy| Given { copy, cache, refusal }))
}

impl Given {
    fn mount(self, user: u32) -> Word {
        let mounted = self.refusal.map_or_else(|| mount_copy(&self.copy, &self.cache, user), Err);
        mounted.map_or_else(Word::NotMounted, |()| Word::Mounted)
    }
}

/// What the kernel says of a file that a user has sent; or why it is not one to be copied for all.
fn look_at(file: &OwnedFd) -> Result<SourceFile, String> {
    let flags = fcntl(file, FcntlArg::F_GETFL).map(OFlag::from_bits_truncate);
    if !flags.is_ok_and(|flags| flags & OFlag::O_ACCMODE == OFlag::O_RDONLY && !flags.contains(OFlag::O_PATH))
    {
        return Err("it is not open for reading alone".to_owned());
    }
    // Before its file system is asked anything: that may be a process of the user's own.
    let fd = file.as_raw_fd();
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    // Names of mount points are bytes, and users may choose them.
    let mounts = fs::read("/proc/self/mountinfo").map_err(|error| cause(&error))?;
    let mount = check_mount(mount.unwrap_or_default(), &String::from_utf8_lossy(&mounts))?;
    let found = fstat(file).map_err(|errno| cause(&errno.into()))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err("it is not a file".to_owned());
    }
    // The path on a mount of this namespace, which no user can have made.
    let path = fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|error| cause(&error))?;
    Ok(SourceFile { path, mount, owner: found.st_uid, mode: found.st_mode, links: found.st_nlink })
}

/// What is mounted there: type and source. A file's identity means something only on a file system that root has mounted.
/// A user who mounts his own, in his own namespace or through FUSE, chooses all of it.
fn check_mount(id: &str, mounts: &str) -> Result<String, String> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(id) && !id.is_empty());
    let line = line.ok_or("it does not lie on a mount of the node")?;
    // 36 35 98:0 /root /place options [optional fields] - type source super-options
    let mut rest = line.split_once(" - ").map_or("", |(_, rest)| rest).split(' ');
    let [kind, source, options] = [(); 3].map(|()| rest.next().unwrap_or_default());
    if PSEUDO.split(' ').any(|pseudo| pseudo == kind) {
        return Err(format!("it lies on {kind}"));
    }
    if kind.starts_with("fuse") && !options.split(',').any(|option| option == "user_id=0") {
        return Err("it lies on a file system that a user serves".to_owned());
    }
    Ok(format!("{kind} {source} "))
}

/// Has the storekeeper find or make the copy, which tells the launcher itself how that goes, and gives it the copy. None if
/// the launcher has ended; the inner None if there is no copy.
fn stage(
    launcher: &Launcher,
    cache: &Cache,
    order: &store::Order,
    staging: &Staging,
) -> Option<Option<File>> {
    let no_copy = |why: &str| Word::NoCopy(why.to_owned()).send(&launcher.socket, None).ok().map(|()| None);
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let Ok((ours, theirs)) = pair else { return no_copy("cannot make a socket") };
    let keeper = getpid();
    let run = || store::run(keeper, [&launcher.socket, &theirs], cache, order, staging);
    let Ok(storekeeper) = sys::spawn_child(run) else { return no_copy("cannot fork") };
    drop(theirs);
    let said = launcher.waits_for(&ours, PollTimeout::NONE).then(|| receive_bytes(&ours).ok()).flatten();
    // It has nothing more to say. One that waits for its file system ends by this.
    let _ = kill(storekeeper, Signal::SIGKILL);
    let _ = waitpid(storekeeper, None);
    match said {
        None => None,
        Some((_, Some(copy))) => Some(Some(copy.into())),
        Some((text, None)) if text.is_empty() => no_copy("the process that copies it has ended"),
        Some(_) => Some(None),
    }
}

/// Mounts a copy where the launcher, which is in the same mount namespace, finds it. The namespace belongs to root, so
/// that the flags stay as they are in every namespace that the user makes of it.
fn mount_copy(copy: &File, cache: &Cache, user: u32) -> Result<(), String> {
    let found = copy.metadata().map_err(|error| cause(&error))?;
    if !(found.is_file() && found.uid() == 0 && found.mode() & 0o7777 == 0o400) {
        return Err("it is not a copy of root's".to_owned());
    }
    let mut magic = [0; 4];
    if copy.read_exact_at(&mut magic, 0).is_err() || magic != *b"hsqs" {
        return Err("it is not a squashfs".to_owned());
    }
    let failed = |what: &str, errno: Errno| format!("{what}: {}", cause(&errno.into()));
    match mkdirat(&cache.dir, MOUNT, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed("cannot make a place for it", errno)),
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = openat(&cache.dir, MOUNT, flags, Mode::empty())
        .map_err(|errno| failed("cannot open the place for it", errno))?;
    // Until the mount is there, this keeps the device.
    let device = find_loop(copy, user).map_or_else(|| attach_loop(copy, user), Ok);
    let (_device, path) = device.map_err(|error| format!("cannot get a loop device: {}", cause(&error)))?;
    mount_device(&path, &place).map_err(|errno| failed("cannot mount it", errno))
}

fn mount_device(device: &Path, place: &OwnedFd) -> Result<(), Errno> {
    let context = match fsopen("squashfs", FsOpenFlags::FSOPEN_CLOEXEC) {
        // Linux before 5.2.
        Err(Errno::NOSYS) => {
            let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
            let place = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
            return mount(device, place, "squashfs", flags, None);
        }
        context => context?,
    };
    fsconfig_set_string(context.as_fd(), "source", device)?;
    fsconfig_set_flag(context.as_fd(), "ro")?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mounted = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mounted.as_fd(), "", place.as_fd(), "", flags)
}

/// `struct loop_info64`; what is not named is zero.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct LoopInfo {
    /// File system and inode of the file, the device's own number, the offset in the file, and its limit.
    numbers: [u64; 5],
    more_numbers: [u32; 3],
    flags: u32,
    /// The beginning of a name that is ours to give.
    user: u64,
    names: [u64; 19],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// The device that another step of the user's has for the same copy. The kernel keeps what it has inflated of a device for all
/// mounts of it: a step beside another one starts as from a directory, and the memory is used once. Not for other users: who
/// shares files shares the locks on them, too.
fn find_loop(copy: &File, user: u32) -> Option<(File, PathBuf)> {
    let found = copy.metadata().ok()?;
    let name = fs::read_link(format!("/proc/self/fd/{}", copy.as_raw_fd())).ok()?;
    // Its name tells without a question to the file system below a device of somebody else's, which may not answer.
    let is_same = |text: String| Path::new(text.trim_end()).file_name() == name.file_name();
    let names = fs::read_dir("/sys/block").ok()?.flatten();
    let made =
        names.filter(|entry| fs::read_to_string(entry.path().join("loop/backing_file")).is_ok_and(is_same));
    let mut paths = made.map(|entry| Path::new("/dev").join(entry.file_name()));
    // As long as it is open it stays what it is.
    let opened = |path: &PathBuf| File::open(path).ok().filter(|device| is_loop_of(device, &found, user));
    paths.find_map(|path| Some((opened(&path)?, path)))
}

/// Whether a device is made of this file for this user, as `attach_loop` makes it.
#[allow(unsafe_code)] // ioctl
fn is_loop_of(device: &File, copy: &fs::Metadata, user: u32) -> bool {
    let mut info = LoopInfo::default();
    // SAFETY: the kernel fills a structure of this form.
    let told = check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) });
    let [file_system, inode, _, offset, limit] = info.numbers;
    let found = (file_system, inode, offset, limit, info.user);
    let flags = info.flags & READ_ONLY_AUTOCLEAR;
    told.is_ok() && found == (copy.dev(), copy.ino(), 0, 0, user.into()) && flags == READ_ONLY_AUTOCLEAR
}

/// Makes a read-only block device of a file: its descriptor, and its path. It vanishes when nobody has it open or mounted.
#[allow(unsafe_code)] // ioctl
fn attach_loop(file: &File, user: u32) -> io::Result<(File, PathBuf)> {
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..LOOP_ATTEMPTS {
        // SAFETY: takes no argument.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::open(&path)?;
        match configure_loop(&device, file, user) {
            Ok(()) => return Ok((device, path)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

#[allow(unsafe_code)] // ioctl
fn configure_loop(device: &File, file: &File, user: u32) -> io::Result<()> {
    let info = LoopInfo { flags: READ_ONLY_AUTOCLEAR, user: user.into(), ..LoopInfo::default() };
    let config = LoopConfig { fd: file.as_raw_fd() as u32, block_size: 0, info, reserved: [0; 8] };
    // SAFETY: the kernel reads a structure of this form.
    match check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }) {
        Ok(_) => return Ok(()),
        // Linux before 5.8.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {}
        Err(error) => return Err(error),
    }
    // SAFETY: takes a descriptor's number. The file is open for reading alone, and so is the device.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_FD, file.as_raw_fd()) })?;
    // SAFETY: the kernel reads a structure of this form.
    if let Err(error) = check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64, &raw const info) })
    {
        // SAFETY: takes no argument.
        unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLEAR_FD) };
        return Err(error);
    }
    Ok(())
}

fn check(outcome: i32) -> io::Result<i32> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
}

#[cfg(test)]
mod tests;
