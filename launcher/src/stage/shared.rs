//! The copies that all users of a node share, as a user sees them: root's keeper makes them and hands them out. This is
//! what is said between the two, and the user's side of it. Runs as the user on the host.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use mizzen_core::failure::cause;
use mizzen_core::kernel_mount::Reader;
use mizzen_core::{Config, Digest, Failure};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};

use super::audience::Doing;
use super::{Audience, Place, Terminal, Trouble};
use crate::image::{Kind, Opened};
use crate::{keeper, sys};

/// Asks for a copy of the file that comes with it.
const STAGE: u8 = b's';
/// Asks for a copy that is to be mounted; if it may not be, that is said at once.
pub const STAGE_AND_MOUNT: u8 = b'm';
/// After one of these: a copy that is there is to be read before it is given out.
pub const VERIFY: u8 = b'v';
/// Asks for a mount of the copy that was given out last.
pub const MOUNT_COPY: u8 = b'M';
/// No message is longer.
const LIMIT: usize = 4096;

/// What the keeper says, each in a message of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// So many bytes of so many are done.
    Done(Doing, u64, u64),
    /// Something that is no failure.
    Note(String),
    /// The copy, whose descriptor comes with it; and whether it has just been made.
    Ready(Digest, bool),
    /// There is no copy; the source can be used.
    NoCopy(String),
    /// The source cannot be read, or changes.
    Unreadable(Failure),
    /// The kernel has mounted the copy.
    Mounted,
    /// It has not, and why.
    NotMounted(String),
}

impl Word {
    fn encode(&self) -> Vec<u8> {
        let mut text = match self {
            Word::Done(Doing::Copying, done, total) => format!("~{done} {total}"),
            Word::Done(Doing::Verifying, done, total) => format!("^{done} {total}"),
            Word::Note(text) => format!("#{text}"),
            Word::Ready(digest, made) => format!("={}{}", u8::from(*made), digest.hex()),
            Word::NoCopy(why) => format!("!{why}"),
            Word::Unreadable(failure) => {
                format!("-{}\n{}", failure.message, failure.hint.as_deref().unwrap_or_default())
            }
            Word::Mounted => "+".to_owned(),
            Word::NotMounted(why) => format!("x{why}"),
        }
        .into_bytes();
        text.truncate(LIMIT);
        text
    }

    fn decode(bytes: &[u8]) -> Option<Word> {
        let text = String::from_utf8_lossy(bytes);
        let (mark, rest) = text.split_at_checked(1)?;
        Some(match mark {
            "~" | "^" => {
                let (done, total) = rest.split_once(' ')?;
                let doing = if mark == "~" { Doing::Copying } else { Doing::Verifying };
                Word::Done(doing, done.parse().ok()?, total.parse().ok()?)
            }
            "#" => Word::Note(rest.to_owned()),
            "=" => Word::Ready(Digest::parse(rest.get(1..)?)?, rest.starts_with('1')),
            "!" => Word::NoCopy(rest.to_owned()),
            "-" => {
                let (message, hint) = rest.split_once('\n').unwrap_or((rest, ""));
                let hint = (!hint.is_empty()).then(|| hint.to_owned());
                Word::Unreadable(Failure { message: message.to_owned(), hint })
            }
            "+" => Word::Mounted,
            "x" => Word::NotMounted(rest.to_owned()),
            _ => return None,
        })
    }

    /// Sends it. Progress and notes that nobody listens to are dropped; everything else waits for the listener, as long as
    /// the socket has patience.
    pub fn send(&self, socket: &OwnedFd, file: Option<&File>) -> nix::Result<()> {
        let text = self.encode();
        let fds: Vec<i32> = file.iter().map(|file| file.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let mut flags = MsgFlags::MSG_NOSIGNAL;
        let droppable = matches!(self, Word::Done(..) | Word::Note(_));
        flags.set(MsgFlags::MSG_DONTWAIT, droppable);
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&text)], control, flags, None) {
            Err(Errno::EAGAIN) if droppable => Ok(()),
            sent => sent.map(drop),
        }
    }

    /// Waits for the next one; None at the end, and for nonsense.
    pub fn receive(socket: &OwnedFd) -> nix::Result<Option<(Word, Option<OwnedFd>)>> {
        let (text, fd) = receive_bytes(socket)?;
        Ok(Word::decode(&text).map(|word| (word, fd)))
    }
}

/// A message as it comes; empty at the end. Of several descriptors one counts, and the others are closed.
pub fn receive_bytes(socket: &OwnedFd) -> nix::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut text = vec![0; LIMIT];
    loop {
        match sys::receive_descriptors(socket, &mut text, MsgFlags::empty()) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok((length, mut fds)) => {
                text.truncate(length);
                return Ok((text, fds.pop()));
            }
        }
    }
}

/// The keeper of the shared copies, as long as this process needs it.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    /// Who is to read the image of this container.
    reader: Reader,
    directory: PathBuf,
    /// What is known of the kernel's mount.
    mount: Mutex<Mount>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Mount {
    NotAsked,
    Possible,
    Asked,
    There,
    Refused(String),
}

impl Keeper {
    /// The keeper at the other end of this socket, which is asked for mounts as well unless `reader` is FUSE.
    pub fn new(socket: OwnedFd, reader: Reader, directory: &Path) -> Keeper {
        Keeper { socket, reader, directory: directory.to_owned(), mount: Mutex::new(Mount::NotAsked) }
    }

    /// A keeper for root himself, which needs no Slurm.
    pub fn of_root(config: &Config) -> Result<Keeper, Failure> {
        let failed = |why: String| Failure::new(format!("cannot start a keeper: {why}"));
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .map_err(|errno| failed(errno.desc().to_owned()))?;
        sys::spawn_detached(&[theirs.as_fd()], || {
            if let Ok(socket) = theirs.try_clone() {
                keeper::Launcher { socket, process: None, may_mount: false }.serve(0, config);
            }
        })
        .map_err(|error| failed(cause(&error)))?;
        Ok(Keeper::new(ours, Reader::Fuse, &config.stage_shared))
    }

    /// Where the kernel's mount is.
    pub fn mount_place(&self) -> PathBuf {
        self.directory.join(keeper::MOUNT)
    }

    /// Whether the container has its image from the kernel, or not at all.
    pub fn must_mount(&self) -> bool {
        self.reader == Reader::Kernel
    }

    /// A copy of the image; and a mount of it, if the site wants that.
    pub(super) fn stage(
        &self,
        source: &Opened,
        mounts: bool,
        verify: bool,
    ) -> Result<(File, Digest, Place), Trouble> {
        let lost = |why: &str| Trouble::Cache(format!("the keeper of the shared copies {why}"));
        let wants_mount = mounts && self.reader != Reader::Fuse;
        let can_mount = source.kind == Kind::Squashfs;
        if wants_mount && !can_mount && self.must_mount() {
            return Err(Trouble::Refused(self.refused("it is not a squashfs as a whole")));
        }
        let asks_mount = wants_mount && can_mount;
        let request = [if asks_mount { STAGE_AND_MOUNT } else { STAGE }, VERIFY];
        let request = if verify { &request[..] } else { &request[..1] };
        sys::pass_descriptors(&self.socket, request, &[source.file.as_raw_fd()])
            .map_err(|errno| lost(&format!("cannot be reached: {}", errno.desc())))?;
        if asks_mount {
            self.note_mount(Mount::Possible);
        }
        let mut terminal = Terminal::new(&source.path);
        loop {
            let word = Word::receive(&self.socket).map_err(|errno| lost(errno.desc()))?;
            match word.ok_or_else(|| lost("has ended"))? {
                (Word::Done(doing, done, total), _) => terminal.advance(doing, done, total),
                (Word::Note(text), _) => terminal.note(&text),
                (Word::Mounted, _) => self.note_mount(Mount::There),
                (Word::NotMounted(why), _) if asks_mount && self.must_mount() => {
                    return Err(Trouble::Refused(self.refused(&why)));
                }
                (Word::NotMounted(why), _) => self.note_mount(Mount::Refused(why)),
                (Word::Ready(digest, made), Some(file)) => {
                    let place = if made { Place::Copied } else { Place::Cache };
                    return Ok((file.into(), digest, place));
                }
                (Word::NoCopy(why), _) => {
                    if asks_mount {
                        self.note_mount(Mount::NotAsked);
                    }
                    return Err(Trouble::Cache(why));
                }
                (Word::Unreadable(failure), _) => return Err(Trouble::Source(failure)),
                (Word::Ready(_, _), None) => return Err(lost("has given no copy")),
            }
        }
    }

    /// The copy is good: has it mounted, if it can be. Not before: a source that was replaced meanwhile is copied again.
    pub(super) fn mount_copy(&self) {
        if self.mount() == Mount::Possible {
            // If it cannot be sent, the answer will be missing.
            let _ = sys::pass_descriptors(&self.socket, &[MOUNT_COPY], &[]);
            self.note_mount(Mount::Asked);
        }
    }

    /// Whether the kernel mounts the copy of the root now, or has done so.
    pub fn is_mounting(&self) -> bool {
        matches!(self.mount(), Mount::Asked | Mount::There)
    }

    /// Waits for it, and tells whether it has. If not, and it was to, there is no container.
    pub fn has_mounted(&self) -> Result<bool, Failure> {
        if self.mount() == Mount::Asked {
            match Word::receive(&self.socket) {
                Ok(Some((Word::Mounted, _))) => self.note_mount(Mount::There),
                Ok(Some((Word::NotMounted(why), _))) => self.note_mount(Mount::Refused(why)),
                _ => {
                    return Err(Failure::new(
                        "the keeper of the shared copies has ended before it had mounted the image",
                    ));
                }
            }
        }
        match self.mount() {
            Mount::Refused(why) if self.must_mount() => Err(self.refused(&why)),
            state => Ok(state == Mount::There),
        }
    }

    /// Why the kernel does not mount the image, if it was asked to and refused.
    pub fn refusal(&self) -> Option<String> {
        match self.mount() {
            Mount::Refused(why) => Some(why),
            Mount::NotAsked | Mount::Possible | Mount::Asked | Mount::There => None,
        }
    }

    fn mount(&self) -> Mount {
        self.mount.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_mount(&self, state: Mount) {
        *self.mount.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// There is no container, because the kernel was to mount its image.
    pub(super) fn refused(&self, why: &str) -> Failure {
        Failure::new(format!("the kernel does not mount it: {why}"))
            .hint("mizzen.toml has mount.squashfs = \"kernel\" here; \"auto\" would serve other images through FUSE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_their_messages() {
        let digest = Digest::new([7; 32]);
        for word in [
            Word::Done(Doing::Copying, 5, u64::MAX),
            Word::Done(Doing::Verifying, 0, 0),
            Word::Note("somebody copies".to_owned()),
            Word::Ready(digest, true),
            Word::Ready(digest, false),
            Word::NoCopy("no room".to_owned()),
            Word::Unreadable(Failure::new("x: cannot read").hint("try again")),
            Word::Unreadable(Failure::new("x: cannot read")),
            Word::Mounted,
            Word::NotMounted(String::new()),
        ] {
            assert_eq!(Word::decode(&word.encode()), Some(word));
        }
        for nonsense in [&b""[..], b"?", b"~1", b"=1", b"=", "é".as_bytes(), b"\xff"] {
            assert_eq!(Word::decode(nonsense), None);
        }
        assert_eq!(Word::Note("ü".repeat(9000)).encode().len(), LIMIT);
    }
}
