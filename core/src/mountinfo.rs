//! /proc/self/mountinfo: what is mounted in this process's mount namespace. Names in it are bytes, and users choose some.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::{fs, io};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

/// A line: `36 35 98:0 /root /place options [optional fields] - type source super-options`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    /// The number of the mount, as in a descriptor's fdinfo.
    pub id: String,
    /// Major and minor number of the file system's device.
    pub device: String,
    /// Where it is mounted.
    pub place: PathBuf,
    /// Of the mount.
    pub options: String,
    /// The type of the file system.
    pub fs_type: String,
    /// What is mounted.
    pub source: String,
    /// Of the file system.
    pub super_options: String,
}

/// All mounts that this process can see.
pub fn read() -> io::Result<Vec<MountLine>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

/// The number of the mount that a descriptor is on. Nothing is asked of the file system itself, which may not answer.
pub fn mount_id(file: impl AsFd) -> io::Result<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.map(|id| id.trim().to_owned()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Opens a name of a directory for looking at it: no link, and nothing that is mounted there. In a directory where everybody
/// can make names, another user may have mounted a file system of their own on one, whose server answers what it likes, or
/// never. Nothing has been asked of it when this returns EXDEV.
pub fn open_on_same_mount(directory: BorrowedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let found = openat(directory, name, flags, Mode::empty())?;
    match mount_id(&found)? == mount_id(directory)? {
        true => Ok(found),
        false => Err(Errno::EXDEV.into()),
    }
}

/// The lines of the file's text.
pub fn parse(text: &[u8]) -> Vec<MountLine> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountLine> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let [id, _, device, _, place, options, optional @ ..] = fields.as_slice() else { return None };
    let separator = optional.iter().position(|field| *field == b"-")?;
    let [_, fs_type, rest @ ..] = &optional[separator..] else { return None };
    let rest = |index: usize| rest.get(index).copied().map(text).unwrap_or_default();
    Some(MountLine {
        id: text(id),
        device: text(device),
        place: PathBuf::from(OsString::from_vec(unescape_octal(place))),
        options: text(options),
        fs_type: text(fs_type),
        source: rest(0),
        super_options: rest(1),
    })
}

/// Blanks, tabs, newlines and backslashes are written as \\ooo.
fn unescape_octal(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'\\')
            .then(|| after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok()))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => (bytes.push(byte), rest = &after[3..]),
            None => (bytes.push(*first), rest = after),
        };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_whatever_users_call_their_mounts() {
        let text = b"36 35 98:0 / / rw - ext4 /dev/sda rw\n\
                     40 36 0:51 / /a\\040b/\xff rw,nosuid shared:7 master:1 - fuse.bindfs /x rw,user_id=0\n\
                     nonsense\n";
        let lines = parse(text);
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[0].id.as_str(), lines[0].fs_type.as_str()), ("36", "ext4"));
        let place = PathBuf::from(OsString::from_vec(b"/a b/\xff".to_vec()));
        assert_eq!((&lines[1].place, lines[1].options.as_str()), (&place, "rw,nosuid"));
        assert_eq!((lines[1].source.as_str(), lines[1].super_options.as_str()), ("/x", "rw,user_id=0"));
    }

    #[test]
    fn this_process_is_on_a_mount_that_is_listed() {
        let id = mount_id(fs::File::open("/proc/self/status").unwrap()).unwrap();
        assert_eq!(read().unwrap().iter().find(|line| line.id == id).unwrap().fs_type, "proc");
    }
}
