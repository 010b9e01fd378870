//! The kernel's FUSE protocol, as in linux/fuse.h: numbers, and structures to and from bytes.
//!
//! Run by: the user, in the FUSE server process.

#![forbid(unsafe_code)]

/// The protocol's major version, the only one there is.
pub const MAJOR: u32 = 7;
/// The minor version that this server was written for; the kernel adapts to it.
pub const MINOR: u32 = 31;
/// Linux 4.18, the first that mounts FUSE in a user namespace.
pub const MIN_MINOR: u32 = 27;
/// The node that the mount itself stands for.
pub const ROOT_ID: u64 = 1;
/// The kernel refuses to deliver requests into less.
pub const REQUEST_BUFFER: usize = 8192 + 4096;

/// Requests. Those that are missing here are answered with ENOSYS.
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// Capabilities, offered by the kernel in INIT and accepted in the answer.
pub mod capability {
    pub const ASYNC_READ: u32 = 1 << 0;
    pub const DO_READDIRPLUS: u32 = 1 << 13;
    pub const NO_OPEN_SUPPORT: u32 = 1 << 17;
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    pub const MAX_PAGES: u32 = 1 << 22;
    pub const CACHE_SYMLINKS: u32 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u32 = 1 << 24;
}

/// Flags of an opened file.
pub mod open_flag {
    /// What the page cache has of the file stays valid.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// The listing may be cached.
    pub const CACHE_DIR: u32 = 1 << 3;
}

/// One request from the kernel.
pub struct Request<'a> {
    /// Which one: see [`opcode`].
    pub opcode: u32,
    /// To be repeated in the answer.
    pub unique: u64,
    /// The node it is about.
    pub node: u64,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    const HEAD_LEN: usize = 40;

    /// Takes a request apart; `None` if it is shorter than it says.
    pub fn parse(bytes: &'a [u8]) -> Option<Request<'a>> {
        let head = Fields(bytes);
        let body = bytes.get(Self::HEAD_LEN..head.u32(0)? as usize)?;
        Some(Request { opcode: head.u32(4)?, unique: head.u64(8)?, node: head.u64(16)?, body })
    }

    /// The structure behind the head.
    pub fn fields(&self) -> Fields<'a> {
        Fields(self.body)
    }

    /// The name that starts `at` bytes into the body and ends with a zero byte.
    pub fn name(&self, at: usize) -> Option<&'a [u8]> {
        let rest = self.body.get(at..)?;
        rest.get(..rest.iter().position(|byte| *byte == 0)?)
    }
}

/// A structure from the kernel, in the machine's byte order.
pub struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// The number at `at`.
    pub fn u32(&self, at: usize) -> Option<u32> {
        self.0.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
    }

    /// The number at `at`.
    pub fn u64(&self, at: usize) -> Option<u64> {
        self.0.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
    }
}

/// A structure for the kernel, put together field by field.
#[derive(Default)]
pub struct Message(Vec<u8>);

impl Message {
    /// Forgets what was put in but keeps the memory.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// What was put in.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends numbers.
    pub fn u64s(&mut self, values: &[u64]) -> &mut Self {
        values.iter().for_each(|value| self.0.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    /// Appends numbers.
    pub fn u32s(&mut self, values: &[u32]) -> &mut Self {
        values.iter().for_each(|value| self.0.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    /// Appends numbers.
    pub fn u16s(&mut self, values: &[u16]) -> &mut Self {
        values.iter().for_each(|value| self.0.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    /// Appends bytes.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends zeros up to a multiple of eight.
    pub fn align(&mut self) -> &mut Self {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self
    }
}

/// The head of an answer: `struct fuse_out_header`.
pub fn answer_head(unique: u64, errno: i32, body_len: usize) -> [u8; 16] {
    let len = (16 + body_len) as u32;
    let mut head = [0; 16];
    head[..4].copy_from_slice(&len.to_ne_bytes());
    head[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    head[8..].copy_from_slice(&unique.to_ne_bytes());
    head
}
