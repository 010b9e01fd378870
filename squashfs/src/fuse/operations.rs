//! What the server answers to each request.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Owner;
use super::abi::{Message, Request, opcode, open_flag};
use super::ahead::Ahead;
use super::entries::{EntryList, FOREVER, Name, attributes, entry, no_entry, reference_of};
use super::init::Features;
use super::recorder::{Access, Recorder};
use crate::reader::{EntryType, Error, Image, Inode, InodeRef, Kind, Piece};

/// The offsets of `.` and `..` in a listing come before those of the image.
const DOTS: u64 = 2;

/// As many unreadable parts of files are remembered.
const MAX_UNREADABLE: usize = 64;

/// All that the threads share.
pub struct Server {
    pub image: Arc<Image>,
    pub owner: Owner,
    pub ahead: Ahead,
    features: Features,
    recorder: Option<Arc<Recorder>>,
    /// Parts of files, by their nodes, that could not be read.
    unreadable: Mutex<Vec<(u64, Range<u64>)>>,
}

/// How a request is answered, if not with an error.
pub enum Answer {
    /// With the message.
    Message,
    /// With a part of a file.
    Contents(Vec<Piece>),
    /// Not at all.
    None,
}

type Result<T> = std::result::Result<T, Failure>;

/// Why a request fails.
#[derive(Debug)]
pub enum Failure {
    /// The request itself cannot be met.
    Request(Errno),
    /// The image gave an error.
    Image(Error),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Request(errno)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Image(error)
    }
}

impl Failure {
    /// What the asking process gets to see.
    pub fn errno(&self) -> Errno {
        match self {
            Failure::Request(errno) => *errno,
            Failure::Image(Error::NotFound) => Errno::NOENT,
            Failure::Image(Error::NotADirectory) => Errno::NOTDIR,
            Failure::Image(Error::NotAFile | Error::NotASymlink) => Errno::INVAL,
            // Also what the storage below says: its ESTALE or ENOENT would mean something else up here.
            Failure::Image(_) => Errno::IO,
        }
    }

    /// The image's error, if the image or its storage is damaged.
    pub fn damage(&self) -> Option<&Error> {
        match self {
            Failure::Image(error) if self.errno() == Errno::IO => Some(error),
            _ => None,
        }
    }
}

impl Server {
    pub fn new(
        image: Arc<Image>,
        owner: Owner,
        features: Features,
        recorder: Option<Arc<Recorder>>,
    ) -> Server {
        let ahead = Ahead::new(image.superblock().block_size);
        Server { image, owner, ahead, features, recorder, unreadable: Mutex::default() }
    }

    pub fn block_size(&self) -> u32 {
        self.image.superblock().block_size
    }

    /// Answers one request; `message` is empty at first.
    pub fn answer(&self, request: &Request<'_>, message: &mut Message) -> Result<Answer> {
        match request.opcode {
            opcode::LOOKUP => self.lookup(request, message)?,
            opcode::GETATTR => self.get_attributes(request, message)?,
            opcode::READLINK => {
                message.raw(&self.image.read_link(&self.inode(request)?)?);
            }
            opcode::READ => return self.read(request),
            opcode::READDIR => self.read_dir(request, message, false)?,
            opcode::READDIRPLUS => self.read_dir(request, message, true)?,
            opcode::GETXATTR => self.get_xattr(request, message)?,
            opcode::LISTXATTR => self.list_xattrs(request, message)?,
            opcode::STATFS => self.statfs(message),
            opcode::OPEN => open(self.features.no_open, open_flag::KEEP_CACHE, message)?,
            opcode::OPENDIR => {
                open(self.features.no_opendir, open_flag::KEEP_CACHE | open_flag::CACHE_DIR, message)?;
            }
            opcode::RELEASE | opcode::RELEASEDIR | opcode::DESTROY => {}
            // Nodes are not counted, and no request takes long enough to be worth interrupting.
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return Ok(Answer::None),
            opcode::SETATTR
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::WRITE
            | opcode::SETXATTR
            | opcode::REMOVEXATTR
            | opcode::CREATE
            | opcode::FALLOCATE
            | opcode::COPY_FILE_RANGE
            | opcode::TMPFILE => return Err(Errno::ROFS.into()),
            _ => return Err(Errno::NOSYS.into()),
        }
        Ok(Answer::Message)
    }

    /// Whether somebody waits for what could not be read. The kernel does not say when it only reads ahead. But what it
    /// did not get so, it asks for again when a program needs it, and then for no more than the piece in question.
    pub fn is_wanted(&self, request: &Request<'_>) -> bool {
        if request.opcode != opcode::READ {
            return true;
        }
        let Ok((offset, len)) = range(request) else { return true };
        let part = offset..offset.saturating_add(len as u64);
        let is_direct = request.fields().u32(32).is_some_and(|flags| flags & OFlags::DIRECT.bits() != 0);
        let mut unreadable = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        let is_again = unreadable
            .iter()
            .any(|(node, known)| *node == request.node && known.start <= part.start && part.end <= known.end);
        if !is_again && unreadable.len() < MAX_UNREADABLE {
            unreadable.push((request.node, part));
        }
        is_again || is_direct || len <= rustix::param::page_size()
    }

    fn inode(&self, request: &Request<'_>) -> Result<Inode> {
        Ok(match reference_of(request.node)? {
            Some(reference) => self.image.inode(reference)?,
            None => self.image.root()?,
        })
    }

    fn lookup(&self, request: &Request<'_>, message: &mut Message) -> Result<()> {
        let name = request.name(0).ok_or(Errno::INVAL)?;
        match self.image.lookup(&self.inode(request)?, name)? {
            Some(reference) => {
                let inode = self.image.inode(reference)?;
                if let Kind::File(_) = inode.kind {
                    self.record(reference, 0, 0);
                }
                entry(message, &inode, self.owner, self.block_size());
            }
            None => no_entry(message),
        }
        Ok(())
    }

    fn get_attributes(&self, request: &Request<'_>, message: &mut Message) -> Result<()> {
        let inode = self.inode(request)?;
        message.u64s(&[FOREVER]).u32s(&[0, 0]);
        attributes(message, &inode, self.owner, self.block_size());
        Ok(())
    }

    fn read(&self, request: &Request<'_>) -> Result<Answer> {
        let (offset, len) = range(request)?;
        let inode = self.inode(request)?;
        self.ahead.follow(inode.reference, offset, len as u64, inode.size());
        self.record(inode.reference, offset, len as u64);
        Ok(Answer::Contents(self.image.read(&inode, offset, len)?))
    }

    fn record(&self, file: InodeRef, offset: u64, len: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.add(Access { file, offset, len });
        }
    }

    fn read_dir(&self, request: &Request<'_>, message: &mut Message, with_attributes: bool) -> Result<()> {
        let (offset, room) = range(request)?;
        let inode = self.inode(request)?;
        let Kind::Directory(directory) = &inode.kind else { return Err(Errno::NOTDIR.into()) };
        let mut list = EntryList { server: self, message, room, with_attributes };
        // The root's parent is outside the image; as everywhere, `/..` is `/`.
        let is_root = inode.reference == self.image.superblock().root;
        let parent = if is_root { inode.number } else { directory.parent };
        let dots: [(&[u8], u32); DOTS as usize] = [(b".", inode.number), (b"..", parent)];
        for (next, (name, number)) in (1..).zip(dots) {
            let dot =
                Name { name, number: number.into(), file_type: EntryType::Directory, next, inode: None };
            if next > offset && !list.push(&dot) {
                return Ok(());
            }
        }
        let mut listing = self.image.read_dir(&inode, offset.saturating_sub(DOTS))?;
        while let Some(entry) = listing.next()? {
            let name = Name {
                name: entry.name,
                number: entry.number.into(),
                file_type: entry.file_type,
                next: entry.next + DOTS,
                inode: Some(entry.inode),
            };
            if !list.push(&name) {
                break;
            }
        }
        Ok(())
    }

    fn get_xattr(&self, request: &Request<'_>, message: &mut Message) -> Result<()> {
        // ENOSYS makes the kernel never ask again, which saves a request for each exec.
        if !self.image.has_xattrs() {
            return Err(Errno::NOSYS.into());
        }
        let name = request.name(8).ok_or(Errno::INVAL)?;
        let value = self.image.get_xattr(&self.inode(request)?, name)?;
        sized_reply(request, message, &value.ok_or(Errno::NODATA)?)
    }

    fn list_xattrs(&self, request: &Request<'_>, message: &mut Message) -> Result<()> {
        if !self.image.has_xattrs() {
            return Err(Errno::NOSYS.into());
        }
        sized_reply(request, message, &self.image.list_xattrs(&self.inode(request)?)?)
    }

    /// `struct fuse_kstatfs`
    fn statfs(&self, message: &mut Message) {
        let superblock = self.image.superblock();
        let blocks = superblock.bytes_used.div_ceil(superblock.block_size.into());
        message
            .u64s(&[blocks, 0, 0, superblock.inodes.into(), 0])
            .u32s(&[superblock.block_size, 255, superblock.block_size, 0])
            .u32s(&[0; 6]);
    }
}

/// OPEN and OPENDIR: ENOSYS tells a kernel that understands it not to ask again, and to keep its caches.
fn open(kernel_can_do_without: bool, flags: u32, message: &mut Message) -> Result<()> {
    if kernel_can_do_without {
        return Err(Errno::NOSYS.into());
    }
    message.u64s(&[0]).u32s(&[flags, 0]);
    Ok(())
}

/// Offset and length out of `struct fuse_read_in`.
fn range(request: &Request<'_>) -> Result<(u64, usize)> {
    let fields = request.fields();
    let range = fields.u64(8).zip(fields.u32(16)).ok_or(Errno::INVAL)?;
    Ok((range.0, range.1 as usize))
}

/// An answer to GETXATTR or LISTXATTR: the length if the caller has no room yet, else the bytes.
fn sized_reply(request: &Request<'_>, message: &mut Message, bytes: &[u8]) -> Result<()> {
    match request.fields().u32(0).ok_or(Errno::INVAL)? as usize {
        0 => message.u32s(&[bytes.len() as u32, 0]),
        room if room < bytes.len() => return Err(Errno::RANGE.into()),
        _ => message.raw(bytes),
    };
    Ok(())
}
