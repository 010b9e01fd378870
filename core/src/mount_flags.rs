//! The flags of a mount that a user asks for, word by word: those of enroot, by which pyxis's users write them, and our own.

use crate::Failure;
use crate::options::parse_size;

/// All words without a value that [`FlagWords::add`] takes, as a message lists them.
pub const MOUNT_FLAGS: &str = "ro, rw, noexec, exec, squashfs, nofail, slave, rslave, shared, rshared, private, rprivate, unbindable, runbindable, \
                         x-create=file, x-create=dir, x-create=auto, x-detach";
/// Those that it takes as well, and that change nothing: a user namespace can bind only whole trees, and no mount inside gives
/// privileges. Times, locks and when what is written is on the disk are the source's business, a mount that fails is told in any
/// case, and who may mount what in /etc/fstab does not matter here. Of `dev` and `suid` the user is told.
pub const MOUNT_FLAGS_WITHOUT_EFFECT: &str = "bind, rbind, nosuid, nodev, defaults, atime, noatime, diratime, nodiratime, relatime, norelatime, async, \
                                        silent, loud, sync, dirsync, strictatime, nostrictatime, lazytime, nolazytime, iversion, noiversion, \
                                        mand, nomand, auto, noauto, user, nouser, users, nousers, owner, noowner, group, nogroup, dev, suid";

fn is_listed(word: &str, list: &str) -> bool {
    list.split(", ").any(|listed| listed == word)
}

/// How a mount is restricted, and what becomes of mounts that are made below it later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountFlags {
    /// Nothing can be written.
    pub read_only: bool,
    /// Programs cannot be executed.
    pub no_exec: bool,
    /// As mount(2) calls it; where nothing is said, it is private with all that is mounted below it.
    pub propagation: Option<Propagation>,
}

/// A mount's propagation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Propagation {
    /// Which.
    pub kind: PropagationKind,
    /// For all mounts below it as well.
    pub recursive: bool,
}

/// What becomes of mounts that are made below it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PropagationKind {
    /// What the node mounts there appears inside.
    Slave,
    /// Mounts in further namespaces of the container appear in each other.
    Shared,
    /// Nothing.
    Private,
    /// The same, and it cannot be bound elsewhere.
    Unbindable,
}

impl Propagation {
    const WORDS: [(&str, PropagationKind); 4] = [
        ("slave", PropagationKind::Slave),
        ("shared", PropagationKind::Shared),
        ("private", PropagationKind::Private),
        ("unbindable", PropagationKind::Unbindable),
    ];

    fn parse(word: &str) -> Option<Propagation> {
        let found = |word: &str| Propagation::WORDS.iter().find(|(known, _)| *known == word);
        let plain = found(word).map(|(_, kind)| Propagation { kind: *kind, recursive: false });
        let recursive = || found(word.strip_prefix('r')?).map(|(_, kind)| *kind);
        plain.or_else(|| recursive().map(|kind| Propagation { kind, recursive: true }))
    }

    fn text(self) -> String {
        let word =
            Propagation::WORDS.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(word, _)| word);
        format!("{}{word}", if self.recursive { "r" } else { "" })
    }
}

/// The options of an empty tmpfs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tmpfs {
    /// What it can hold, as the kernel reads it.
    pub size: Option<String>,
    /// The permissions of its directory, in octal.
    pub mode: Option<String>,
    /// How many files it can have, as the kernel reads it.
    pub inodes: Option<String>,
    /// What it can hold, in pages.
    pub blocks: Option<String>,
    /// When it takes huge pages.
    pub huge: Option<String>,
    /// Whose its directory is.
    pub uid: Option<u32>,
    /// And of which group.
    pub gid: Option<u32>,
}

impl Tmpfs {
    /// Everybody's, as /tmp is, where nothing else is said.
    pub const DEFAULT_MODE: &str = "1777";

    /// One of this size.
    pub fn of_size(size: Option<String>) -> Tmpfs {
        Tmpfs { size, ..Tmpfs::default() }
    }

    /// What is said of it alone, word by word.
    fn words(&self) -> impl Iterator<Item = String> {
        let number = |id: Option<u32>| id.map(|id| id.to_string());
        let said = [
            ("size", self.size.clone()),
            ("mode", self.mode.clone()),
            ("nr_inodes", self.inodes.clone()),
            ("nr_blocks", self.blocks.clone()),
            ("huge", self.huge.clone()),
            ("uid", number(self.uid)),
            ("gid", number(self.gid)),
        ];
        said.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)))
    }

    /// The name of something that is said of it.
    pub fn first_word(&self) -> Option<String> {
        let word = self.words().next()?;
        word.split_once('=').map(|(name, _)| format!("{name}="))
    }

    /// What mount(2) is given.
    pub fn text(&self) -> String {
        let mode = self.mode.as_deref().unwrap_or(Tmpfs::DEFAULT_MODE).to_owned();
        Tmpfs { mode: Some(mode), ..self.clone() }.words().collect::<Vec<_>>().join(",")
    }
}

/// What a mount point is to be where the image lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// `x-create=file`.
    File,
    /// `x-create=dir`.
    Directory,
}

/// All flags of one mount, as they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagWords {
    /// Those of the mount itself.
    pub flags: MountFlags,
    /// Those of a tmpfs.
    pub tmpfs: Tmpfs,
    /// The source is a squashfs file.
    pub squashfs: bool,
    /// A source that is not there is no failure.
    pub no_fail: bool,
    /// What the mount point is to be.
    pub create: Option<Create>,
    /// Nothing is mounted, and what is there is not there inside.
    pub detach: bool,
    /// What was asked for and cannot be had.
    pub without_effect: Vec<&'static str>,
}

impl FlagWords {
    /// Takes one word; None if there is no such flag.
    pub fn add(&mut self, word: &str) -> Result<Option<()>, Failure> {
        match word {
            "dev" => self.without_effect.push("dev"),
            "suid" => self.without_effect.push("suid"),
            _ if is_listed(word, MOUNT_FLAGS_WITHOUT_EFFECT) => {}
            // What the hint does not name is not taken.
            _ if !is_listed(word, MOUNT_FLAGS) => match word.split_once('=') {
                Some(("size", size)) => self.tmpfs.size = Some(parse_size(size)?),
                Some(("mode", mode)) => self.tmpfs.mode = Some(parse_mode(mode)?),
                Some(("nr_inodes", count)) => self.tmpfs.inodes = Some(parse_count("nr_inodes", count)?),
                Some(("nr_blocks", count)) => self.tmpfs.blocks = Some(parse_count("nr_blocks", count)?),
                Some(("huge", when @ ("never" | "always" | "within_size" | "advise"))) => {
                    self.tmpfs.huge = Some(when.to_owned());
                }
                Some(("uid", id)) => self.tmpfs.uid = Some(parse_id("uid", id)?),
                Some(("gid", id)) => self.tmpfs.gid = Some(parse_id("gid", id)?),
                _ => return Ok(None),
            },
            "ro" => self.flags.read_only = true,
            "rw" => self.flags.read_only = false,
            "noexec" => self.flags.no_exec = true,
            "exec" => self.flags.no_exec = false,
            "x-detach" => self.detach = true,
            "squashfs" => self.squashfs = true,
            "nofail" => self.no_fail = true,
            "x-create=file" => self.create = Some(Create::File),
            "x-create=dir" => self.create = Some(Create::Directory),
            // As without it.
            "x-create=auto" => {}
            _ => match Propagation::parse(word) {
                Some(propagation) => self.flags.propagation = Some(propagation),
                None => return Ok(None),
            },
        }
        Ok(Some(()))
    }

    /// The words that [`FlagWords::add`] reads as these flags.
    pub fn text(&self) -> String {
        let MountFlags { read_only, no_exec, propagation } = self.flags;
        let create = self.create.map(|create| match create {
            Create::File => "x-create=file",
            Create::Directory => "x-create=dir",
        });
        let words = [
            self.squashfs.then(|| "squashfs".to_owned()),
            self.tmpfs.words().reduce(|words, word| format!("{words}+{word}")),
            Some(if read_only { "ro" } else { "rw" }.to_owned()),
            no_exec.then(|| "noexec".to_owned()),
            propagation.map(Propagation::text),
            self.no_fail.then(|| "nofail".to_owned()),
            create.map(str::to_owned),
            self.detach.then(|| "x-detach".to_owned()),
            (!self.without_effect.is_empty()).then(|| self.without_effect.join("+")),
        ];
        words.into_iter().flatten().collect::<Vec<_>>().join("+")
    }
}

/// Permissions as chmod takes them.
fn parse_mode(text: &str) -> Result<String, Failure> {
    let good = (3..=4).contains(&text.len()) && text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
    if good {
        return Ok(text.to_owned());
    }
    Err(Failure::new(format!("mode={} is not an octal mode", crate::failure::quote(text.as_bytes()))))
}

/// A number as the kernel reads it, with k, m or g behind it.
fn parse_count(name: &str, text: &str) -> Result<String, Failure> {
    let digits = text.strip_suffix(|letter| "kmgKMG".contains(letter)).unwrap_or(text);
    if !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Ok(text.to_owned());
    }
    Err(Failure::new(format!("{name}={} is not a number", crate::failure::quote(text.as_bytes()))))
}

fn parse_id(name: &str, text: &str) -> Result<u32, Failure> {
    text.parse().map_err(|_| {
        Failure::new(format!("{name}={} is not a number", crate::failure::quote(text.as_bytes())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_survives_its_text() {
        let listed = [MOUNT_FLAGS, MOUNT_FLAGS_WITHOUT_EFFECT].into_iter().flat_map(|list| list.split(", "));
        let with_values = [
            "size=1g",
            "mode=0755",
            "nr_inodes=10k",
            "nr_blocks=0",
            "huge=never",
            "huge=within_size",
            "uid=0",
            "gid=7",
        ];
        for word in listed.chain(with_values) {
            let mut flags = FlagWords::default();
            assert_eq!(flags.add(word), Ok(Some(())), "{word}");
            let mut again = FlagWords::default();
            flags.text().split('+').for_each(|word| drop(again.add(word)));
            assert_eq!(again, flags, "{word}");
        }
        for word in ["remount", "x-move", "huge=often", "x-create", "rro", "rrslave", ""] {
            assert_eq!(FlagWords::default().add(word), Ok(None), "{word}");
        }
        let failure = FlagWords::default().add("mode=999").unwrap_err();
        assert_eq!(failure.message, "mode=999 is not an octal mode");
        for (word, message) in [
            ("nr_inodes=", "nr_inodes= is not a number"),
            ("nr_blocks=5%", "nr_blocks=5% is not a number"),
            ("uid=alice", "uid=alice is not a number"),
        ] {
            assert_eq!(FlagWords::default().add(word).unwrap_err().message, message);
        }
    }

    #[test]
    fn a_tmpfs_is_everybodys_unless_told_otherwise() {
        assert_eq!(Tmpfs::default().text(), "mode=1777");
        let small =
            Tmpfs { mode: Some("700".to_owned()), gid: Some(7), ..Tmpfs::of_size(Some("1m".to_owned())) };
        assert_eq!(small.text(), "size=1m,mode=700,gid=7");
    }
}
