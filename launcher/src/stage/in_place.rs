//! An image that is used where it is, where somebody may write into it while it is used (`cp new.sqsh image.sqsh`). Runs as the user,
//! in the launcher and in the FUSE server process behind its filter.
//!
//! Blocks that are stored uncompressed, or that happen to decode, would then be another image's, without a word. So every read looks
//! at the file's size and time of modification afterwards. Where they are not what they were, the superblock is compared with the one
//! that the image was opened by: another image has another one, while `touch`, which people use to keep files from being purged,
//! leaves it as it was. (It has the time at which the image was made, in seconds, and where its tables are: two images that do not
//! differ in these cannot be told apart like this.)
//!
//! The new times do not become those to compare with: of a file that is being written to, the first bytes may be the last to
//! change. A touched image costs a short read more for each read, until the container ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use mizzen_squashfs::{ByteSource, Superblock};
use rustix::fs::fstat;

/// Reading takes this beside what every server may call.
const CALLS: &[libc::c_long] = &[libc::SYS_fstat];

/// The image's file, and what it was when the image was opened.
pub struct InPlace {
    file: File,
    /// Where the squashfs starts.
    offset: u64,
    version: Version,
    superblock: [u8; Superblock::LENGTH],
}

/// What changes when somebody writes to a file, or touches it: its size and time of modification.
type Version = (i64, i64, u64);

fn version(file: &File) -> io::Result<Version> {
    let stat = fstat(file)?;
    Ok((stat.st_size, stat.st_mtime, stat.st_mtime_nsec))
}

impl InPlace {
    /// The image that starts at byte `offset` of a file.
    pub fn new(file: File, offset: u64) -> io::Result<InPlace> {
        // Before anything is read of it.
        let version = version(&file)?;
        let mut superblock = [0; Superblock::LENGTH];
        // Too short a file is told of by who looks for an image in it.
        if let Err(error) = FileExt::read_exact_at(&file, &mut superblock, offset)
            && error.kind() != io::ErrorKind::UnexpectedEof
        {
            return Err(error);
        }
        Ok(InPlace { file, offset, version, superblock })
    }

    /// Whether the file has still the image that was opened.
    fn is_same(&self) -> io::Result<bool> {
        if version(&self.file)? == self.version {
            return Ok(true);
        }
        let mut superblock = [0; Superblock::LENGTH];
        match FileExt::read_exact_at(&self.file, &mut superblock, self.offset) {
            Ok(()) => Ok(superblock == self.superblock),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl ByteSource for InPlace {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        // What is shorter now says so itself.
        FileExt::read_exact_at(&self.file, buffer, at)?;
        match self.is_same()? {
            true => Ok(()),
            false => Err(io::Error::other("the file has another image by now")),
        }
    }

    fn will_need(&self, at: u64, length: u64) {
        self.file.will_need(at, length);
    }

    fn original(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.file.as_fd()]
    }

    fn system_calls(&self) -> &'static [libc::c_long] {
        CALLS
    }
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::{Duration, SystemTime};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let file = File::from(memfd_create("image", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    fn touch(file: &File, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        file.set_times(FileTimes::new().set_modified(time)).unwrap();
    }

    fn read(source: &InPlace) -> Result<[u8; 4], String> {
        let mut buffer = [0; 4];
        source.read_exact_at(&mut buffer, 200).map(|()| buffer).map_err(|error| error.to_string())
    }

    #[test]
    fn another_image_in_the_file_is_seen() {
        for offset in [0, 100] {
            let file = file(&[7; 300]);
            touch(&file, 1);
            let source = InPlace::new(file.try_clone().unwrap(), offset).unwrap();
            assert_eq!(read(&source), Ok([7; 4]));
            touch(&file, 2);
            assert_eq!(read(&source), Ok([7; 4]), "touched");
            // In any order: the superblock may be what is written last.
            file.write_all_at(&[8; 4], 200).unwrap();
            file.write_all_at(&[8; 1], offset + 95).unwrap();
            touch(&file, 3);
            assert_eq!(read(&source).unwrap_err(), "the file has another image by now");
            // Whatever it is told to be later, it is what was opened only as it was then.
            file.write_all_at(&[7; 1], offset + 95).unwrap();
            file.set_len(400).unwrap();
            touch(&file, 1);
            assert_eq!(read(&source), Ok([8; 4]));
        }
    }

    #[test]
    fn a_file_that_is_written_anew_is_none_meanwhile() {
        let file = file(&[7; 300]);
        let source = InPlace::new(file.try_clone().unwrap(), 0).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(read(&source).unwrap_err(), "failed to fill whole buffer");
        // As far as it has come, its beginning may be missing still.
        file.write_all_at(&[7; 4], 200).unwrap();
        assert_eq!(read(&source).unwrap_err(), "the file has another image by now");
    }
}
