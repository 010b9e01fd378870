//! What shim and helper say to each other over their connection.
//!
//! 1. The shim sends one byte with four descriptors: a memory file with the [`CommandRequest`] (argv and environment may be
//!    megabytes) and its standard streams.
//! 2. Then one byte for each signal that the command shall get, with [`FROM_TERMINAL`] where a terminal sent it.
//! 3. The helper sends the [`CommandResult`] and closes. Closing without an answer means that it was killed.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use mizzen_core::Failure;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};

use super::named_files::{Inode, NamedFile};

/// Both ends are the same program, unless it was replaced while the job ran.
const VERSION: &[u8] = b"mizzen slurm 4";

/// A terminal signals all processes in its foreground, so the command's children get it too.
pub const FROM_TERMINAL: u8 = 0x80;

/// The limits that Slurm hands from srun and sbatch to the tasks: `ulimit -s unlimited` in a batch script counts.
const LIMITS: [Resource; 10] = [
    Resource::RLIMIT_CPU,
    Resource::RLIMIT_FSIZE,
    Resource::RLIMIT_DATA,
    Resource::RLIMIT_STACK,
    Resource::RLIMIT_CORE,
    Resource::RLIMIT_RSS,
    Resource::RLIMIT_NPROC,
    Resource::RLIMIT_NOFILE,
    Resource::RLIMIT_MEMLOCK,
    Resource::RLIMIT_AS,
];

/// What shall run, and what it inherits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRequest {
    /// The name of the command.
    pub command: OsString,
    /// Its words after the name.
    pub arguments: Vec<OsString>,
    /// The working directory inside.
    pub directory: PathBuf,
    /// What directory that is.
    pub directory_inode: Option<Inode>,
    /// The files that the words name.
    pub files: Vec<NamedFile>,
    /// The environment, as it leaves the container.
    pub environment: Vec<(OsString, OsString)>,
    /// The rest of what a process inherits.
    pub inherited: Inherited,
}

/// Numbers that a process inherits and Slurm hands on to tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inherited {
    umask: u32,
    /// Soft limits, in the order of `LIMITS`.
    limits: Vec<u64>,
}

impl Inherited {
    /// Those of this process.
    pub fn of_self() -> Inherited {
        let mask = umask(Mode::empty());
        umask(mask);
        let soft = |resource: &Resource| getrlimit(*resource).map_or(u64::MAX, |(soft, _)| soft);
        Inherited { umask: mask.bits(), limits: LIMITS.iter().map(soft).collect() }
    }

    /// Makes them those of this process, as far as its hard limits allow.
    pub fn apply(&self) {
        umask(Mode::from_bits_truncate(self.umask));
        for (resource, soft) in LIMITS.iter().zip(&self.limits) {
            if let Ok((_, hard)) = getrlimit(*resource) {
                let _ = setrlimit(*resource, (*soft).min(hard), hard);
            }
        }
    }
}

impl CommandRequest {
    /// Strings, each with a NUL at its end: none of them can hold one.
    pub fn encode(&self) -> Vec<u8> {
        let limits: Vec<String> = self.inherited.limits.iter().map(u64::to_string).collect();
        let mut bytes = Vec::new();
        let mut put = |parts: &[&[u8]]| {
            parts.iter().for_each(|part| bytes.extend_from_slice(part));
            bytes.push(0);
        };
        put(&[VERSION]);
        put(&[self.command.as_bytes()]);
        put(&[self.directory.as_os_str().as_bytes()]);
        put(&[Inode::encode(self.directory_inode).as_bytes()]);
        put(&[self.inherited.umask.to_string().as_bytes()]);
        put(&[limits.join(",").as_bytes()]);
        put(&[self.arguments.len().to_string().as_bytes()]);
        self.arguments.iter().for_each(|word| put(&[word.as_bytes()]));
        put(&[self.files.len().to_string().as_bytes()]);
        self.files.iter().for_each(|file| put(&[&file.encode()]));
        self.environment.iter().for_each(|(name, value)| put(&[name.as_bytes(), b"=", value.as_bytes()]));
        bytes
    }

    /// The order again, or None if these bytes are none.
    pub fn decode(bytes: &[u8]) -> Option<CommandRequest> {
        let mut strings = bytes.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        if strings.next()? != VERSION {
            return None;
        }
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let command = text(strings.next()?);
        let directory = PathBuf::from(text(strings.next()?));
        let directory_inode = Inode::decode(strings.next()?)?;
        let umask = number(strings.next()?)?;
        let limits = strings.next()?.split(|byte| *byte == b',').map(number).collect::<Option<_>>()?;
        let count: usize = number(strings.next()?)?;
        let arguments: Vec<OsString> = strings.by_ref().take(count).map(text).collect();
        if arguments.len() != count {
            return None;
        }
        let count: usize = number(strings.next()?)?;
        let files: Vec<NamedFile> =
            strings.by_ref().take(count).map(NamedFile::decode).collect::<Option<_>>()?;
        if files.len() != count {
            return None;
        }
        let environment = strings.map(|line| {
            // The first byte belongs to the name, as in the C library.
            let equals = line.iter().skip(1).position(|byte| *byte == b'=')? + 1;
            Some((text(&line[..equals]), text(&line[equals + 1..])))
        });
        let environment = environment.collect::<Option<_>>()?;
        Some(CommandRequest {
            command,
            arguments,
            directory,
            directory_inode,
            files,
            environment,
            inherited: Inherited { umask, limits },
        })
    }
}

/// A number as text.
pub fn number<T: std::str::FromStr>(bytes: &[u8]) -> Option<T> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// No part of an answer is longer.
const ANSWER_LIMIT: usize = 4096;

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandResult {
    /// With this exit code.
    Exited(u8),
    /// By this signal.
    Killed(u8),
    /// It never began.
    Refused(Failure),
}

impl CommandResult {
    /// A letter, and a number or a failure.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            CommandResult::Exited(code) => vec![b'E', *code],
            CommandResult::Killed(signal) => vec![b'K', *signal],
            CommandResult::Refused(failure) => [b"R", failure.encode().as_bytes()].concat(),
        }
    }

    /// The answer again, or None if these bytes are none.
    pub fn decode(bytes: &[u8]) -> Option<CommandResult> {
        match bytes {
            [b'E', code] => Some(CommandResult::Exited(*code)),
            [b'K', signal] => Some(CommandResult::Killed(*signal)),
            [b'R', text @ ..] => Some(CommandResult::Refused(Failure::decode(text, ANSWER_LIMIT))),
            _ => None,
        }
    }
}

/// Pairs of text as pairs of a process.
#[cfg(test)]
pub fn pairs<N: AsRef<std::ffi::OsStr>, V: AsRef<std::ffi::OsStr>>(
    list: &[(N, V)],
) -> Vec<(OsString, OsString)> {
    list.iter().map(|(name, value)| (name.as_ref().to_owned(), value.as_ref().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use mizzen_core::failure::FailureKind;

    use super::*;

    fn order() -> CommandRequest {
        let wild: Vec<u8> = (1..=255).collect();
        let wild = OsString::from_vec(wild);
        CommandRequest {
            command: "srun".into(),
            arguments: vec!["".into(), wild.clone(), "a b".into(), "K=V".into(), "".into()],
            directory: PathBuf::from(&wild),
            directory_inode: Inode::decode(b"1:2").unwrap(),
            files: vec![NamedFile::decode(b"program - - =./job.sh").unwrap()],
            environment: pairs(&[
                ("A", wild.as_os_str()),
                ("=odd", OsStr::new("")),
                ("B", OsStr::new("x=y")),
            ]),
            inherited: Inherited { umask: 0o27, limits: vec![u64::MAX, 0, 8 << 20] },
        }
    }

    #[test]
    fn an_order_comes_back() {
        assert_eq!(CommandRequest::decode(&order().encode()), Some(order()));
        let bare = CommandRequest { arguments: Vec::new(), environment: Vec::new(), ..order() };
        assert_eq!(CommandRequest::decode(&bare.encode()), Some(bare));
    }

    #[test]
    fn broken_orders_are_refused() {
        let good = order().encode();
        // Cut anywhere, it is refused or shorter, and nothing breaks. Whole strings off the end leave an order.
        for length in 0..good.len() {
            if let Some(less) = CommandRequest::decode(&good[..length]) {
                assert!(less.environment.len() < order().environment.len(), "{length}");
            }
        }
        let broken: [&[u8]; 9] = [
            b"",
            b"\0",
            b"mizzen slurm 1\0srun\0/\0-\x000\x000\x000\x000\0",
            b"mizzen slurm 2\0srun\0/\0-\x000\x00x\x000\x000\0",
            b"mizzen slurm 2\0srun\0/\0x\x000\x000\x000\x000\0",
            b"mizzen slurm 2\0srun\0/\0-\x000\x000\x0099999999999999999999\0",
            b"mizzen slurm 2\0srun\0/\0-\x000\x000\x0018446744073709551615\0a\0",
            b"mizzen slurm 2\0srun\0/\0-\x000\x000\x000\x001\0",
            b"mizzen slurm 2\0srun\0/\0-\x000\x000\x000\x000\0NOVALUE\0",
        ];
        for bytes in broken {
            assert_eq!(CommandRequest::decode(bytes), None, "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn an_answer_comes_back() {
        let failure = Failure::new("srun: no such command on node1");
        for answer in [
            CommandResult::Exited(0),
            CommandResult::Exited(255),
            CommandResult::Killed(9),
            CommandResult::Refused(failure.clone().of_kind(FailureKind::NotFound)),
            CommandResult::Refused(failure.hint("is Slurm installed there?")),
        ] {
            assert_eq!(CommandResult::decode(&answer.encode()), Some(answer));
        }
        for bytes in [b"".as_slice(), b"E", b"E12", b"X1"] {
            assert_eq!(CommandResult::decode(bytes), None);
        }
    }

    #[test]
    fn limits_and_umask_are_read_and_set() {
        let mine = Inherited::of_self();
        assert_eq!(mine.limits.len(), LIMITS.len());
        mine.apply();
        assert_eq!(Inherited::of_self(), mine);
    }
}
