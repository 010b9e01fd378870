//! The process that serves a squashfs through FUSE. It belongs to the container's life: it ends when the last
//! process that sees the mount ends, and not before, whatever signals the job gets.
//!
//! It starts before anything else, and reads ahead while the container is planned and made. The device over which it
//! serves is opened later, in the container's user namespace: the kernel lets it be mounted only there. From the first byte
//! of the image on it is confined to a few system calls. Its parent watches over it (`watcher.rs`).

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mizzen_core::Failure;
use mizzen_core::failure::{cause, quote};
use mizzen_squashfs::{self as squashfs, fuse};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, memfd_create};

use super::processes::own_mount_name;
use super::readahead;
use super::standby::{self, Shared};
use super::watcher::{self, Steps, Watch, Watched, WatcherConnection};
use crate::image::shown;
use crate::plan::Identity;
use crate::report::megabytes;
use crate::stage::profile::{PROFILE_LIMIT, ReadsWriter, StartProfile, WORTHWHILE};
use crate::sys;

/// A server that waits for its device.
pub struct Server {
    process: OwnedFd,
    /// The image's.
    path: PathBuf,
    uid: u32,
    gid: u32,
    layers: Vec<LayerDirectory>,
}

/// A directory with files of the image, which an overlay puts over it.
pub struct LayerDirectory {
    pub path: PathBuf,
    /// What was found there.
    pub dev: u64,
    pub ino: u64,
}

/// Whose the files are inside.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    /// The user.
    pub fn new(identity: &Identity) -> Owner {
        Owner { uid: identity.inside_uid, gid: identity.inside_gid }
    }
}

/// The lock of those who serve a named container, one after the other.
pub struct ServerLock {
    /// Its file.
    pub path: PathBuf,
    /// The file in which is written why the container ends.
    pub end: PathBuf,
    /// A process after whose end the server is not needed, unless it has its turn by then.
    pub until: Option<OwnedFd>,
}

// What a message with a device says of its connection.
const NEW: u8 = 1;
const RESUMED: u8 = 2;

const UNSTARTED: &str = "cannot start the file server";
const UNCONFINED: &str = "the server reads images only under a filter of its own; something on this node keeps users from installing one, \
                          perhaps another program's filter around this one; `mizzen doctor` tries it";

const SILENT: &str = "the kernel kills processes when memory runs out: see `dmesg` on the node, and the limit of the step (--mem); else this is a \
                      bug of mizzen, please report it";

/// A server whose files can be mounted.
pub struct Mountable {
    process: OwnedFd,
    path: PathBuf,
    uid: u32,
    gid: u32,
    device: File,
    /// The last one is below the others.
    pub layers: Vec<LayerDirectory>,
}

impl Server {
    /// Starts a server for an image, which the user knows as `path` and whose files belong to the user inside. It reads
    /// ahead what `command` needs, and what the profile says that its starts read. Where there is a lock, it serves when it has
    /// that.
    pub fn start(
        image: &Arc<squashfs::Image>,
        path: &Path,
        command: &[OsString],
        owner: Owner,
        watch: &Watch,
        lock: Option<&ServerLock>,
        profile: Option<&StartProfile>,
    ) -> Result<Server, Failure> {
        let failed = |error: io::Error| Failure::caused_by(UNSTARTED, error);
        let (wait, process) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed(errno.into()))?;
        let (to_watcher, from_server) = watcher::connection().map_err(failed)?;
        let to_watcher = Arc::new(to_watcher);
        let Owner { uid, gid } = owner;
        let owner = fuse::Owner::Fixed { uid, gid };
        let until = lock.and_then(|lock| lock.until.as_ref());
        let shared = lock.map(Shared::open).transpose().map_err(failed)?;
        let shared = shared.as_ref();
        let name = quote(path.as_os_str().as_bytes());
        // In memory: under its filter the server cannot make a file.
        let reads =
            profile.and_then(|_| memfd_create("mizzen-profile", MemfdFlags::CLOEXEC).ok()).map(File::from);
        let mut keep_watching = watch.descriptors();
        keep_watching.extend([from_server.as_fd(), image.source().original()]);
        keep_watching.extend(reads.as_ref().map(AsFd::as_fd));
        keep_watching.extend(shared.into_iter().flat_map(Shared::descriptors));
        keep_watching.extend(until.map(AsFd::as_fd));
        keep_watching.extend(profile.into_iter().flat_map(StartProfile::descriptors));
        let mut keep_serving = vec![wait.as_fd(), to_watcher.as_fd()];
        keep_serving.extend(image.source().descriptors());
        keep_serving.extend(until.map(AsFd::as_fd));
        keep_serving.extend(shared.into_iter().flat_map(Shared::descriptors));
        keep_serving.extend(reads.as_ref().map(AsFd::as_fd));
        // As long as there is a server, nobody removes what is over its files.
        keep_serving.extend(profile.into_iter().flat_map(StartProfile::locks).map(AsFd::as_fd));
        let starts = profile.zip(reads.as_ref());
        let starting = sys::spawn_watched(
            &keep_serving,
            || match serve(
                &wait,
                image,
                command,
                owner,
                &to_watcher,
                shared.map(|shared| (shared, until)),
                starts,
            ) {
                Ok(()) => {
                    to_watcher.ended(&work_of(image, profile));
                    0
                }
                Err(error) => {
                    to_watcher.failed(&error.to_string());
                    1
                }
            },
            &keep_watching,
            |pid| {
                let shared =
                    shared.map(|shared| Steps { shared, until: until.map(AsFd::as_fd), name: &name });
                Watched { name: &name, image, server: &from_server, steps: shared.as_ref(), starts }
                    .watch(pid, watch);
            },
            // In the server's place, for whoever wants to talk to it.
            |error| {
                let _ =
                    nix::unistd::write(&wait, &error.raw_os_error().unwrap_or(libc::EAGAIN).to_ne_bytes());
            },
        )
        .map_err(failed)?;
        // Before the plan: what cannot be started has the time to say so.
        starting.finish().map_err(failed)?;
        let layers = profile.map_or(&[][..], StartProfile::layers).iter();
        let layers = layers
            .map(|layer| LayerDirectory { path: layer.path.clone(), dev: layer.dev, ino: layer.ino })
            .collect();
        Ok(Server { process, path: path.to_owned(), uid, gid, layers })
    }

    /// Has it go on with the connection of another server when that has ended.
    pub fn stand_by(self, connection: &OwnedFd) -> Result<(), Failure> {
        sys::send_descriptors(&self.process, &[RESUMED], &[connection.as_raw_fd()])
            .map_err(|errno| Failure::caused_by("the file server has ended", errno))
    }

    /// Opens the device; called inside the user namespace, where the host's /dev can still be seen.
    pub fn open_device(self) -> Result<Mountable, Failure> {
        let Server { process, path, uid, gid, layers } = self;
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map_err(|error| {
            Failure::caused_by("cannot open /dev/fuse", error)
                .or_hint("load the kernel module fuse, and give /dev/fuse mode 0666")
        })?;
        Ok(Mountable { process, path, uid, gid, device, layers })
    }
}

impl Mountable {
    /// Where the server says why it has not begun.
    pub fn last_words(&self) -> Option<LastWords> {
        Some(LastWords { process: self.process.try_clone().ok()?, path: self.path.clone() })
    }

    /// Mounts what the server has; called inside the mount namespace. If this fails, its last words may tell why.
    pub fn mount(self, place: &Path) -> Result<(), Failure> {
        let Mountable { process, uid, gid, device, .. } = self;
        let device_fd = device.as_raw_fd();
        let options = format!(
            "fd={device_fd},rootmode=40755,user_id={uid},group_id={gid},allow_other,default_permissions"
        );
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let name = own_mount_name();
        mount(Some(name.as_str()), place, Some("fuse"), flags, Some(options.as_str())).map_err(|errno| {
            Failure::caused_by("cannot mount the image through FUSE", errno)
                .or_hint("`mizzen doctor` tells whether FUSE works in user namespaces here")
        })?;
        sys::send_descriptors(&process, &[NEW], &[device_fd])
            .map_err(|errno| Failure::caused_by("the file server has ended", errno))
    }
}

/// How a server ended that did not begin, or ended as soon as it had.
pub struct LastWords {
    process: OwnedFd,
    path: PathBuf,
}

impl LastWords {
    /// Why it has ended: an error's number, or a text, or only that it has; None if it goes on.
    pub fn why_ended(&self) -> Option<Failure> {
        let mut said = [0; 256];
        let mut receive = || recv(self.process.as_raw_fd(), &mut said, MsgFlags::MSG_DONTWAIT);
        // The kernel first tells, once, that the device which was sent has not been taken.
        let received =
            receive().or_else(|errno| if errno == Errno::ECONNRESET { receive() } else { Err(errno) });
        let said = match received {
            Ok(length) => said.get(..length)?,
            Err(Errno::EAGAIN) => return None,
            Err(_) => &[],
        };
        Some(match (said, <[u8; 4]>::try_from(said)) {
            (_, Ok(number)) => {
                let error = io::Error::from_raw_os_error(i32::from_ne_bytes(number));
                Failure::caused_by(UNSTARTED, error)
            }
            ([], _) => Failure::new(format!(
                "{}: its file server has ended before the container was there",
                shown(&self.path)
            ))
            .hint(SILENT),
            (said, _) => Failure::new(format!("{UNSTARTED}: {}", quote(said))).hint(UNCONFINED),
        })
    }
}

/// A start has calmed down when nothing is read for so long.
const QUIET: Duration = Duration::from_secs(1);
/// A step may end before that, and its end kills everything. So what was read is noted as often as this, and then less and less.
const NOTED: Duration = Duration::from_millis(400);
/// Of all that a start has read, the last part of this size may not be noted.
const UNNOTED: u32 = 8;

/// The threads that read ahead, and note what is read for the next start. If one fails, nobody needs to know.
const READ_AHEAD: &str = "read-ahead";

/// What the process does: it reads ahead, waits for its device, and serves until the mount is gone.
fn serve(
    wait: &OwnedFd,
    image: &Arc<squashfs::Image>,
    command: &[OsString],
    owner: fuse::Owner,
    watcher: &Arc<WatcherConnection>,
    shared: Option<(&Shared, Option<&OwnedFd>)>,
    starts: Option<(&StartProfile, &File)>,
) -> io::Result<()> {
    become_server();
    end_on_panic(Arc::clone(watcher));
    let (workers, turn) = match shared {
        None => (fuse::Workers::new(threads()), None),
        Some((shared, until)) => {
            sys::share_descriptors();
            let lock = shared.lock.try_clone()?;
            let Some(turn) = standby::take_turn(lock, until.map(AsFd::as_fd))? else { return Ok(()) };
            // The one before it has met something in the image that no other is to meet.
            if shared.end.failure().is_some() {
                return Ok(());
            }
            watcher.serves();
            (fuse::Workers::with_one_queue(threads()), Some(turn))
        }
    };
    let notes = Arc::clone(watcher);
    image.source().on_note(Box::new(move |text| notes.note(text)));
    let reads_file = starts.and_then(|(_, file)| file.try_clone().ok());
    // From here on the image is read, and nothing else can be done any more. Kernels without filters serve all the same.
    fuse::filter::confine(image.source().system_calls()).map_err(|error| {
        let why = format!("its seccomp filter cannot be installed: {}", cause(&error));
        // Before there is a container, its maker tells the user.
        let _ = nix::unistd::write(wait, why.as_bytes());
        io::Error::other(why)
    })?;
    // Without a thread for it, those who come later do not find this server; those who are there have their files.
    let _ = turn.as_ref().map(standby::Turn::take_lock_later);
    let recorder = starts.map(|_| Arc::new(fuse::Recorder::new(WORTHWHILE)));
    let profile = starts.map(|(profile, _)| profile);
    // One thread for all that need not be done at once. Where there can be no more threads, that is left out.
    let beside = {
        let (image, watcher, recorder) = (Arc::clone(image), Arc::clone(watcher), recorder.clone());
        // What is unpacked is not read through this server.
        let is_unpacked = profile.is_some_and(|profile| !profile.layers().is_empty());
        let (command, reads) = (command.to_vec(), profile.and_then(StartProfile::reads_ahead));
        std::thread::Builder::new().name(READ_AHEAD.to_owned()).spawn(move || {
            if !is_unpacked {
                readahead::read(&image, &readahead::first_files(&command, &image));
            }
            let Some(recorder) = recorder else { return };
            if let Some(reads) = reads {
                readahead::read_profile(&image, &reads, &recorder);
            }
            if let Some(file) = reads_file {
                note_reads(&image, &recorder, file, &watcher);
            }
        })
    };
    // The device says that the mount is there; the end of the socket, that there will be none.
    let mut kind = [NEW];
    let message = sys::receive_descriptors(wait, &mut kind, MsgFlags::empty());
    let Some(device) = message.ok().and_then(|(_, mut fds)| fds.pop()) else { return Ok(()) };
    let connection = if kind == [RESUMED] { fuse::Connection::Resumed } else { fuse::Connection::New };
    let told = Mutex::new(false);
    let report = |damage: &fuse::Damage| {
        // One at a time: nobody goes on with an error before the user has been told.
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if !*told {
            let file = damage.node.map_or_else(|| Some(b"/".to_vec()), |node| image.path_of(node));
            *told = watcher.damage(file.as_deref(), damage.error);
        }
    };
    let outcome =
        fuse::serve(device, connection, Arc::clone(image), owner, workers, recorder.clone(), &report);
    if let Some((recorder, beside)) = recorder.zip(beside.ok()) {
        recorder.end();
        let _ = beside.join();
    }
    outcome
}

/// Has the watcher write down what the start reads, until it has calmed down.
fn note_reads(
    image: &squashfs::Image,
    recorder: &fuse::Recorder,
    mut file: File,
    watcher: &WatcherConnection,
) {
    let (begin, mut writer) = (Instant::now(), ReadsWriter::new(PROFILE_LIMIT));
    loop {
        let (accesses, phase) = recorder.take(QUIET, NOTED.max(begin.elapsed() / UNNOTED));
        if !accesses.is_empty() && file.write_all(&writer.text(image, &accesses)).is_err() {
            return;
        }
        if writer.has_text() {
            watcher.has_reads(phase);
        }
        if phase != fuse::Phase::Growing {
            return;
        }
    }
}

/// Where the bytes of an image came from, for people: what is unpacked does not come through here.
fn work_of(image: &squashfs::Image, profile: Option<&StartProfile>) -> String {
    let squashfs::Work { read, inflated } = image.work();
    let origin = match image.source().missed() {
        None => String::new(),
        Some(missed) => format!(
            ", {} of them from the copy on the node, {} from where the image is",
            megabytes(read.saturating_sub(missed)),
            megabytes(missed)
        ),
    };
    let unpacked = match profile.map_or(0, StartProfile::unpacked_files) {
        0 => String::new(),
        1 => "; 1 file was unpacked before".to_owned(),
        files => format!("; {files} files were unpacked before"),
    };
    format!("{} read{origin}; {} inflated{unpacked}", megabytes(read), megabytes(inflated))
}

/// As many as can work at once, within reason. (The standard library's answer takes a tenth of a millisecond, for which the
/// read-ahead would wait: it reads the cgroup's files too.)
fn threads() -> usize {
    let cpus = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    (0..CpuSet::count()).filter(|cpu| cpus.is_set(*cpu) == Ok(true)).count().clamp(2, 8)
}

/// Leaves everything behind that belongs to the job's program rather than to a server for all its tasks.
fn become_server() {
    let _ = nix::unistd::chdir("/");
    sys::use_all_cpus();
    // No core files of image data, and no files but those it has.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_CORE) {
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, hard);
    }
    // The job's programs may be short of memory; what they read must not fail for that.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_AS) {
        let _ = setrlimit(Resource::RLIMIT_AS, hard, hard);
    }
    let _ = nix::sys::prctl::set_name(c"mizzen-fuse");
    let _ = nix::sys::prctl::set_no_new_privs();
    let _ = sys::drop_capabilities();
}

/// A thread that panics has taken a request that it will never answer: the whole server ends, and says why.
fn end_on_panic(watcher: Arc<WatcherConnection>) {
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(READ_AHEAD) {
            watcher.failed(&panic.to_string().replace('\n', " "));
            sys::exit_now(1);
        }
    }));
}
