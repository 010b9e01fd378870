//! The values of options that shape a container, as the user writes them and parsed. The client checks them before
//! a job is submitted; the launcher parses them again on the node.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::failure::{quote, quote_reference};
use crate::mount_flags::{Create, FlagWords, MOUNT_FLAGS, MOUNT_FLAGS_WITHOUT_EFFECT};
pub use crate::mount_flags::{MountFlags, Tmpfs};

/// One `--mount`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOption {
    /// What is mounted.
    pub source: MountSource,
    /// Where, inside.
    pub target: PathBuf,
    /// How.
    pub flags: MountFlags,
    /// Whether it is left out where its source is not there.
    pub no_fail: bool,
    /// What the source must be, where that is said.
    pub create: Option<Create>,
    /// Flags that cannot be had, and do no harm.
    pub without_effect: Vec<&'static str>,
}

/// What `--mount` mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountSource {
    /// A file or directory of the host, with everything mounted below it.
    Bind(PathBuf),
    /// The content of a squashfs file of the host.
    Squashfs(PathBuf),
    /// An empty tmpfs.
    Tmpfs(Tmpfs),
    /// Nothing: what would be mounted there otherwise is not.
    Umount,
}

/// One `--env`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EnvOption {
    /// `NAME=VALUE`.
    Set(OsString, OsString),
    /// `NAME`: the host's value, whatever the image says.
    FromHost(OsString),
    /// `!NAME`: no such variable, whoever sets it.
    Unset(OsString),
}

/// Parses `SRC[:DST[:FLAGS]]`, and several of them joined by commas. A backslash takes a colon, comma, dollar, tilde or
/// backslash literally. Flags are joined by `+`, as pyxis does.
pub fn parse_mounts(text: &OsStr) -> Result<Vec<MountOption>, Failure> {
    split(text.as_bytes(), b',').iter().map(|part| parse_mount(part)).collect()
}

/// Parses one `SRC[:DST[:FLAGS]]`, in which a comma is a letter like any other.
pub fn parse_mount(part: &[u8]) -> Result<MountOption, Failure> {
    // Somebody may try to mount what only an image can be: docker://user:password@host/image.
    let shown = quote_reference(part);
    let bad = |why: &str| {
        Failure::new(format!("\"{shown}\": {why}")).hint(format!(
            "write SRC:DST:FLAGS with FLAGS like ro+noexec, several joined by commas; there are {MOUNT_FLAGS}, and of tmpfs size=SIZE, \
             mode=MODE, nr_inodes=N, nr_blocks=N, huge=WHEN, uid=ID and gid=ID; these are taken and change nothing: {MOUNT_FLAGS_WITHOUT_EFFECT}"
        ))
    };
    if part.iter().any(u8::is_ascii_control) {
        return Err(bad("control character"));
    }
    if let Some(not_expanded) = expected_of_a_shell(part) {
        return Err(Failure::new(format!("\"{shown}\": {not_expanded} is not expanded")).hint(
            "write the whole path; %u stands for your user name, %j for the job, \\$ and \\~ for themselves",
        ));
    }
    let fields: Vec<PathBuf> = split(part, b':')
        .iter()
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field, b":,$~\\"))))
        .collect();
    let (source, target, flags) = match fields.as_slice() {
        [source] => (source, source, None),
        [source, target] => (source, target, None),
        [source, target, flags] => (source, target, Some(flags)),
        _ => return Err(bad("more than three parts")),
    };
    if source.as_os_str().is_empty() {
        return Err(bad("the source is empty"));
    }
    if target.as_os_str().is_empty() {
        return Err(bad("the destination is empty"));
    }
    if leaves_root(target) {
        return Err(bad("the destination leaves the container's root: Cross-device link"));
    }
    if fields.len() > 1 && !target.is_absolute() {
        return Err(bad("the destination is not absolute"));
    }
    if is_root(target) {
        return Err(bad("the destination is the root itself"));
    }
    // Nothing behind the second colon is what a variable without a value leaves.
    let words = flags.map_or("", |flags| flags.to_str().unwrap_or("?"));
    let mut parsed = FlagWords::default();
    for word in words.split('+').filter(|_| !words.is_empty()) {
        match parsed.add(word).map_err(|failure| bad(&failure.message))? {
            Some(()) => {}
            None if shown != quote(part) => return Err(bad("unknown flag")),
            None => return Err(bad(&format!("unknown flag \"{}\"", quote(word.as_bytes())))),
        }
    }
    let FlagWords { flags, tmpfs, squashfs, no_fail, create, detach, without_effect } = parsed;
    let is_tmpfs = source.as_os_str() == "tmpfs" && fields.len() > 1;
    // That is how a line of enroot's fstab unmounts.
    let is_umount = detach || source.as_os_str() == "umount" && fields.len() > 1;
    if let Some(word) = tmpfs.first_word().filter(|_| !is_tmpfs) {
        return Err(bad(&format!("{word} belongs to tmpfs")));
    }
    let source = match (is_tmpfs, squashfs) {
        _ if is_umount => MountSource::Umount,
        (true, true) => return Err(bad("tmpfs cannot be squashfs")),
        (true, false) => MountSource::Tmpfs(tmpfs),
        (false, true) if fields.len() == 1 => return Err(bad("a squashfs file needs a destination")),
        (false, true) => MountSource::Squashfs(source.clone()),
        (false, false) => MountSource::Bind(source.clone()),
    };
    let is_directory = matches!(source, MountSource::Tmpfs(_) | MountSource::Squashfs(_));
    if is_directory && create == Some(Create::File) {
        return Err(bad("x-create=file: what is mounted is a directory"));
    }
    Ok(MountOption { source, target: target.clone(), flags, no_fail, create, without_effect })
}

/// Whether a path leads above where it begins.
fn leaves_root(path: &Path) -> bool {
    let mut depth = 0_usize;
    path.components().any(|part| match part {
        Component::Normal(_) => {
            depth += 1;
            false
        }
        Component::ParentDir if depth == 0 => true,
        Component::ParentDir => {
            depth -= 1;
            false
        }
        Component::RootDir | Component::CurDir | Component::Prefix(_) => false,
    })
}

/// What a shell would have replaced, had it seen this: options in quotes and on #SBATCH lines reach us as they are.
pub fn expected_of_a_shell(text: &[u8]) -> Option<String> {
    let at_start = |at: usize| at == 0 || text.get(at - 1) == Some(&b':');
    let mut escaped = false;
    for (at, byte) in text.iter().enumerate() {
        let next = text.get(at + 1).copied().unwrap_or(b'/');
        match byte {
            b'\\' if !escaped => {
                escaped = true;
                continue;
            }
            b'~' if !escaped && at_start(at) && (next.is_ascii_alphanumeric() || b"/:_".contains(&next)) => {
                return Some("~".to_owned());
            }
            b'$' if !escaped && (next.is_ascii_alphabetic() || b"_{(".contains(&next)) => {
                let word = text.get(at + 1..).unwrap_or_default();
                let end = word.iter().skip(1).position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
                let name = word.get(..end.map_or(word.len(), |end| end + 1)).unwrap_or_default();
                return Some(format!("${}", quote(name)));
            }
            _ => {}
        }
        escaped = false;
    }
    None
}

/// Whether a path is `/` in one of its spellings.
fn is_root(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| matches!(part, Component::Normal(_)))
}

/// Splits at a separator that no backslash precedes.
pub fn split(text: &[u8], separator: u8) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte == separator {
            parts.push(Vec::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(byte);
            if byte == b'\\' {
                part.extend(bytes.next());
            }
        }
    }
    parts
}

/// Takes the backslash from before these characters, and leaves others alone.
fn unescape(text: &[u8], special: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut bytes = text.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        match bytes.peek() {
            Some(next) if byte == b'\\' && special.contains(next) => plain.extend(bytes.next()),
            _ => plain.push(byte),
        }
    }
    plain
}

impl MountOption {
    /// The path that somebody else could not find.
    pub fn relative(&self) -> Option<&Path> {
        let paths = match &self.source {
            MountSource::Bind(path) | MountSource::Squashfs(path) => [path, &self.target],
            MountSource::Tmpfs(_) | MountSource::Umount => [&self.target; 2],
        };
        paths.into_iter().find(|path| !path.is_absolute()).map(PathBuf::as_path)
    }

    /// Relative paths belong to `directory`.
    pub fn absolute(mut self, directory: &Path) -> MountOption {
        if let MountSource::Bind(path) | MountSource::Squashfs(path) = &mut self.source {
            *path = directory.join(&path);
        }
        self.target = directory.join(&self.target);
        self
    }

    /// A destination that is not said is the source's, and a relative one begins in `directory`, inside.
    pub fn at(mut self, directory: &Path) -> Result<MountOption, Failure> {
        if self.target.is_relative() {
            // Without the dots in it.
            self.target = directory.join(&self.target).components().collect();
            if is_root(&self.target) {
                return Err(Failure::new("mounts: a destination is the root itself")
                    .hint("write it behind a colon: ./:/work"));
            }
        }
        Ok(self)
    }

    /// The text that [`parse_mounts`] reads as this mount.
    pub fn to_text(&self) -> Vec<u8> {
        let mut words = FlagWords {
            flags: self.flags,
            no_fail: self.no_fail,
            create: self.create,
            without_effect: self.without_effect.clone(),
            ..FlagWords::default()
        };
        let source = match &self.source {
            MountSource::Bind(path) => path.as_os_str(),
            MountSource::Squashfs(path) => {
                words.squashfs = true;
                path.as_os_str()
            }
            MountSource::Tmpfs(tmpfs) => {
                words.tmpfs = tmpfs.clone();
                OsStr::new("tmpfs")
            }
            MountSource::Umount => OsStr::new("umount"),
        };
        let parts = [source.as_bytes(), self.target.as_os_str().as_bytes()].map(|part| escape(part, b":,$~"));
        [parts[0].as_slice(), &parts[1], words.text().as_bytes()].join(&b':')
    }
}

impl EnvOption {
    /// The name of the variable.
    pub fn name(&self) -> &OsStr {
        match self {
            EnvOption::Set(name, _) | EnvOption::FromHost(name) | EnvOption::Unset(name) => name,
        }
    }

    /// The text that [`parse_env_list`] reads as this variable, alone or behind names without values.
    pub fn to_text(&self) -> Vec<u8> {
        match self {
            EnvOption::Set(name, value) => {
                [escape(name.as_bytes(), b","), escape(value.as_bytes(), b",")].join(&b'=')
            }
            EnvOption::FromHost(name) => escape(name.as_bytes(), b","),
            EnvOption::Unset(name) => [b"!".as_slice(), &escape(name.as_bytes(), b",")].concat(),
        }
    }
}

fn escape(text: &[u8], separators: &[u8]) -> Vec<u8> {
    let special = |byte: &u8| *byte == b'\\' || separators.contains(byte);
    text.iter().flat_map(|byte| special(byte).then_some(b'\\').into_iter().chain([*byte])).collect()
}

/// Parses `NAME[=VALUE]` and `!NAME`, and several of them joined by commas. What follows a comma and cannot be a name belongs to the
/// value before it: `CUDA_VISIBLE_DEVICES=0,1`. A comma that could be either is refused; `\,` is always the value's.
pub fn parse_env_list(text: &OsStr) -> Result<Vec<EnvOption>, Failure> {
    let mut items: Vec<Vec<u8>> = Vec::new();
    for part in split(text.as_bytes(), b',') {
        let part = unescape(&part, b":,\\");
        let name_len = part.iter().position(|byte| *byte == b'=');
        let is_name = looks_like_name(part.get(..name_len.unwrap_or(part.len())).unwrap_or_default());
        match items.last_mut().filter(|item| item.contains(&b'=')) {
            Some(item) if is_name && name_len.is_none() => {
                let name = item.split(|byte| *byte == b'=').next().unwrap_or_default();
                let name = quote(name);
                // Either half may be a secret.
                let message = format!(
                    "\"{name}=…,…\": what follows the comma could be a variable, or a part of {name}"
                );
                return Err(Failure::new(message).hint(format!(
                    "write {name}=…\\,… for a comma in the value, or give the option once for each variable"
                )));
            }
            // Nothing behind the last comma is a slip.
            Some(item) if !is_name && !part.is_empty() && name_len != Some(0) => {
                item.push(b',');
                item.extend(part);
            }
            _ => items.push(part),
        }
    }
    let parsed = items.iter().map(|item| match parse_env(OsStr::from_bytes(item))? {
        EnvOption::Set(name, _) | EnvOption::Unset(name) if !looks_like_name(name.as_bytes()) => {
            Err(not_a_name(name.as_bytes()))
        }
        variable => Ok(variable),
    });
    parsed.collect()
}

fn not_a_name(name: &[u8]) -> Failure {
    Failure::new(format!("\"{}\": not a variable's name", quote(name)))
        .hint("write NAME=VALUE, without `export` and without blanks before the =")
}

/// Whether this would be the name of a variable, as people choose them.
pub fn looks_like_name(text: &[u8]) -> bool {
    text.first().is_some_and(|byte| byte.is_ascii_alphabetic() || *byte == b'_')
        && text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(byte))
}

/// Parses `NAME=VALUE`, `NAME` or `!NAME`.
pub fn parse_env(text: &OsStr) -> Result<EnvOption, Failure> {
    let bytes = text.as_bytes();
    if let Some(name) = bytes.strip_prefix(b"!") {
        let name = OsStr::from_bytes(name).to_owned();
        return if looks_like_name(name.as_bytes()) {
            Ok(EnvOption::Unset(name))
        } else {
            Err(not_a_name(bytes))
        };
    }
    let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
        Some(equals) => (&bytes[..equals], Some(&bytes[equals + 1..])),
        None => (bytes, None),
    };
    if name.iter().any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control()) {
        return Err(not_a_name(name));
    }
    if name.is_empty() {
        // The value may be a secret that was typed with a variable that is not set: $NAME=….
        let shown = if value.is_some() { "=…" } else { "" };
        return Err(Failure::new(format!("\"{shown}\": the name is empty"))
            .hint("write NAME=VALUE, or NAME for the host's value"));
    }
    let name = OsStr::from_bytes(name).to_owned();
    Ok(match value {
        Some(value) => EnvOption::Set(name, OsStr::from_bytes(value).to_owned()),
        None => EnvOption::FromHost(name),
    })
}

/// Checks a size for tmpfs: a number with k, m, g or % behind it, and not 0, which would mean no limit.
pub fn parse_size(text: &str) -> Result<String, Failure> {
    let digits = text.trim_end_matches(|c: char| "kmgKMG%".contains(c));
    let good = digits.parse::<u64>().is_ok_and(|number| number > 0) && text.len() - digits.len() <= 1;
    if good {
        return Ok(text.to_owned());
    }
    Err(Failure::new(format!("\"{}\" is not a size", quote(text.as_bytes())))
        .hint("write a number with k, m or g behind it, or a percentage of the node's memory: 512m, 2g, 50%"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<MountOption>, Failure> {
        parse_mounts(OsStr::new(text))
    }

    fn bind(source: &str, target: &str, flags: MountFlags) -> MountOption {
        let source = MountSource::Bind(source.into());
        MountOption {
            source,
            target: target.into(),
            flags,
            no_fail: false,
            create: None,
            without_effect: Vec::new(),
        }
    }

    #[test]
    fn a_destination_that_is_not_said_is_the_sources() {
        let at = |text: &str, directory: &str| {
            parse(text).unwrap().remove(0).at(Path::new(directory)).map(|mount| mount.target)
        };
        for (text, directory, target) in [
            ("./data", "/", "/data"),
            ("data/a/./b", "/", "/data/a/b"),
            ("./data", "/home/alice", "/home/alice/data"),
            ("./", "/home/alice", "/home/alice"),
            ("/data", "/home/alice", "/data"),
            ("./data:/x/./y", "/home/alice", "/x/./y"),
        ] {
            assert_eq!(at(text, directory), Ok(target.into()), "{text}");
        }
        assert_eq!(at("./", "/").unwrap_err().message, "mounts: a destination is the root itself");
    }

    #[test]
    fn mounts_are_parsed() {
        let read_only = MountFlags { read_only: true, ..MountFlags::default() };
        assert_eq!(parse("/data"), Ok(vec![bind("/data", "/data", MountFlags::default())]));
        assert_eq!(
            parse("data:/data:ro,/x:/y:rw+noexec+rbind"),
            Ok(vec![
                bind("data", "/data", read_only),
                bind("/x", "/y", MountFlags { no_exec: true, ..MountFlags::default() })
            ])
        );
        assert_eq!(parse(r"/a\:b\,c:/d"), Ok(vec![bind("/a:b,c", "/d", MountFlags::default())]));
        assert_eq!(
            parse("tmpfs:/scratch:size=1G").unwrap()[0].source,
            MountSource::Tmpfs(Tmpfs::of_size(Some("1G".to_owned())))
        );
        assert_eq!(parse("umount:/tmp").unwrap()[0].source, MountSource::Umount);
        assert_eq!(parse("umount").unwrap()[0].source, MountSource::Bind("umount".into()), "a file");
        assert_eq!(parse("/a b:/c d:"), Ok(vec![bind("/a b", "/c d", MountFlags::default())]));
        let kept = parse("/a:/b:nofail+unbindable+x-create=dir").unwrap().remove(0);
        assert!(kept.no_fail && kept.create == Some(Create::Directory) && kept.flags.propagation.is_some());
        assert_eq!(parse("d.sqsh:/d:squashfs").unwrap()[0].source, MountSource::Squashfs("d.sqsh".into()));
    }

    #[test]
    fn an_unknown_flag_is_told_all_that_there_are() {
        let hint = parse_mount(b"/a:/b:shiny").unwrap_err().hint.unwrap();
        let listed = [MOUNT_FLAGS, MOUNT_FLAGS_WITHOUT_EFFECT].map(|list| hint.contains(list));
        assert!(listed == [true, true], "{hint}");
        for word in ["exec", "noatime", "rslave", "x-create=auto"] {
            assert!(hint.contains(&format!(" {word},")) || hint.contains(&format!(" {word} ")), "{hint}");
        }
    }

    #[test]
    fn bad_mounts_are_named() {
        let cases = [
            ("", "\"\": the source is empty"),
            (":", "\":\": the source is empty"),
            ("a:", "\"a:\": the destination is empty"),
            (":b", "\":b\": the source is empty"),
            ("/a:/b:ro:x", "\"/a:/b:ro:x\": more than three parts"),
            ("/a:/b:shiny", "\"/a:/b:shiny\": unknown flag \"shiny\""),
            ("/a:/b:ro+", "\"/a:/b:ro+\": unknown flag \"\""),
            (
                "/home:../home",
                "\"/home:../home\": the destination leaves the container's root: Cross-device link",
            ),
            (
                "/a:/b/../..",
                "\"/a:/b/../..\": the destination leaves the container's root: Cross-device link",
            ),
            ("/a:/b:mode=0700", "\"/a:/b:mode=0700\": mode= belongs to tmpfs"),
            ("tmpfs:/b:mode=9", "\"tmpfs:/b:mode=9\": mode=9 is not an octal mode"),
            (
                "tmpfs:/b:x-create=file",
                "\"tmpfs:/b:x-create=file\": x-create=file: what is mounted is a directory",
            ),
            ("/a:/b,", "\"\": the source is empty"),
            ("/a:b", "\"/a:b\": the destination is not absolute"),
            ("/a:/", "\"/a:/\": the destination is the root itself"),
            ("/a://./", "\"/a://./\": the destination is the root itself"),
            ("/", "\"/\": the destination is the root itself"),
            ("/a:/b\n", "\"/a:/b\\n\": control character"),
            ("/a:/b:size=1G", "\"/a:/b:size=1G\": size= belongs to tmpfs"),
            ("docker://u:secret@host", "\"docker://…@host\": unknown flag"),
            ("docker://u:secret@host/i:/x", "\"docker://…@host/i:/x\": more than three parts"),
            ("u:secret@host/i:/x", "\"…@host/i:/x\": the destination is not absolute"),
        ];
        for (text, expected) in cases {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.message, expected);
        }
    }

    #[test]
    fn variables_are_parsed() {
        assert_eq!(parse_size("512m"), Ok("512m".to_owned()));
        for text in ["", "0", "m", "1m,size=9g", "10Q", "1mm", "-1"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(parse_env(OsStr::new("A=b=c")), Ok(EnvOption::Set("A".into(), "b=c".into())));
        assert_eq!(parse_env(OsStr::new("A")), Ok(EnvOption::FromHost("A".into())));
        assert_eq!(parse_env(OsStr::new("!A")), Ok(EnvOption::Unset("A".into())));
        assert_eq!(parse_env(OsStr::new("!A=1")).unwrap_err().message, "\"!A=1\": not a variable's name");
        assert_eq!(parse_env(OsStr::new("=x")).unwrap_err().message, "\"=…\": the name is empty");
    }

    #[test]
    fn commas_in_values_are_kept() {
        let set = |name: &str, value: &str| EnvOption::Set(name.into(), value.into());
        let host = |name: &str| EnvOption::FromHost(name.into());
        for (text, expected) in [
            ("CUDA_VISIBLE_DEVICES=0,1", vec![set("CUDA_VISIBLE_DEVICES", "0,1")]),
            ("A=0,1,B=2,-3,/x=y", vec![set("A", "0,1"), set("B", "2,-3,/x=y")]),
            ("A=1,B=2", vec![set("A", "1"), set("B", "2")]),
            (r"A=x\,y,B=z", vec![set("A", "x,y"), set("B", "z")]),
            (r"A=\$x\~", vec![set("A", r"\$x\~")]),
            ("A,B,C=1", vec![host("A"), host("B"), set("C", "1")]),
            ("!A,B,C=1", vec![EnvOption::Unset("A".into()), host("B"), set("C", "1")]),
        ] {
            assert_eq!(parse_env_list(OsStr::new(text)), Ok(expected), "{text}");
        }
        for (text, message) in [
            ("A=x,y", "\"A=…,…\": what follows the comma could be a variable, or a part of A"),
            (
                "HOSTS=n-1,n-2",
                "\"HOSTS=…,…\": what follows the comma could be a variable, or a part of HOSTS",
            ),
            ("A=1,", "\"\": the name is empty"),
            ("A=1,=2", "\"=…\": the name is empty"),
            ("1=2", "\"1\": not a variable's name"),
        ] {
            assert_eq!(parse_env_list(OsStr::new(text)).unwrap_err().message, message);
        }
    }

    #[test]
    fn what_a_shell_would_have_replaced_is_refused() {
        for (text, word) in [
            ("~/data:/data", "~"),
            ("~bob:/data", "~"),
            ("/data:~/x", "~"),
            ("$HOME/x:/x", "$HOME"),
            ("/scratch/${USER}:/x", "${USER"),
            ("/a:/b/$(id)", "$(id"),
        ] {
            let message = format!("\"{text}\": {word} is not expanded");
            assert_eq!(parse(text).unwrap_err().message, message);
        }
        assert_eq!(parse(r"\~/x\$y:/z").unwrap(), [bind("~/x$y", "/z", MountFlags::default())]);
        for text in ["/a~/b:/c", "/cost$:/d", "/a$1:/b", "/x/~old:/y"] {
            assert!(parse(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn every_mount_and_variable_survives_its_text() {
        let mounts = r"/a\:b\,c:/d:ro+noexec,/x,\~/\$y:/z,tmpfs:/s:size=1G+mode=755,d.sqsh:/d\\e:squashfs,umount:/t,/m:/m:rslave";
        let parsed = parse(mounts).unwrap();
        let texts: Vec<Vec<u8>> = parsed.iter().map(MountOption::to_text).collect();
        assert_eq!(parse_mounts(OsStr::from_bytes(&texts.join(&b','))), Ok(parsed.clone()));
        assert_eq!(
            parsed[4].clone().absolute(Path::new("/w")).source,
            MountSource::Squashfs("/w/d.sqsh".into())
        );
        let variables = parse_env_list(OsStr::new(r"A,G\\H,B=x\,y\\z=,C=,D=f\,E")).unwrap();
        assert_eq!(variables[2], EnvOption::Set("B".into(), r"x,y\z=".into()));
        let texts: Vec<Vec<u8>> = variables.iter().map(EnvOption::to_text).collect();
        assert_eq!(parse_env_list(OsStr::from_bytes(&texts.join(&b','))), Ok(variables));
    }
}
