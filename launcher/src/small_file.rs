//! Small files that a user names: they may be pipes, as the shell's `<(…)` are, which somebody may never write to, or devices, which
//! have no end. Runs as the user, in the launcher and in the importer.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long the writer of a pipe may keep us waiting.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reads a file to its end, of at most `limit` bytes.
pub fn read_small(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    read_in_time(path, limit, PATIENCE)
}

fn read_in_time(path: &Path, limit: usize, patience: Duration) -> io::Result<Vec<u8>> {
    // O_NONBLOCK: a FIFO that nobody writes to could not even be opened otherwise.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let end = Instant::now() + patience;
    let (mut text, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    let mut written = file.metadata()?.is_file();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let ready = poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], timeout);
        match file.read(&mut buffer) {
            Ok(0) if written || ready != Ok(0) => return Ok(text),
            // A FIFO that nobody has opened for writing yet.
            Ok(0) => {}
            Ok(count) => {
                written = true;
                text.extend_from_slice(&buffer[..count]);
            }
            Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind()) => {
            }
            Err(error) => return Err(error),
        }
        if text.len() > limit {
            return Err(io::Error::other(format!("larger than {} MiB", limit >> 20)));
        }
        if left.is_zero() {
            let seconds = patience.as_secs();
            return Err(io::Error::other(format!("a pipe whose writer has not ended after {seconds} s")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_to_their_end_or_not_at_all() {
        let read = |path: &str, limit| {
            read_in_time(Path::new(path), limit, Duration::from_millis(50)).map_err(|error| error.to_string())
        };
        assert_eq!(read("/dev/null", 1 << 20), Ok(Vec::new()));
        assert_eq!(read("/dev/zero", 1 << 20), Err("larger than 1 MiB".to_owned()));
        assert_eq!(read("/proc/self/comm", 1 << 20).map(|name| name.ends_with(b"\n")), Ok(true));
        let (reader, writer) = io::pipe().unwrap();
        let pipe = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        assert_eq!(read(&pipe, 9), Err("a pipe whose writer has not ended after 0 s".to_owned()));
        drop(writer);
        assert_eq!(read(&pipe, 9), Ok(Vec::new()));
    }
}
