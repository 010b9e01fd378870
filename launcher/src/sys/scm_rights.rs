//! Messages with descriptors between processes.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::cmsg_space;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    socketpair,
};
use nix::sys::wait::{WaitStatus, waitpid};

/// Sends a message with descriptors. The kernel compares those that all processes of the user have under way with the
/// sender's limit on open files; the steps of a job that run at once have many more than one of them needs.
pub fn send_descriptors(socket: &OwnedFd, text: &[u8], fds: &[i32]) -> nix::Result<()> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    if let Ok((_, hard)) = limit {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(text)], control, flags, None);
    if let Ok((soft, hard)) = limit {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, soft, hard);
    }
    sent.map(drop)
}

/// Receives a message with its descriptors, and tells how long its text is. There is room for as many as a message can
/// have (SCM_MAX_FD): those that had no room the kernel would close in our name, which may take as long as their sender likes.
pub fn receive_descriptors(
    socket: &OwnedFd,
    text: &mut [u8],
    flags: MsgFlags,
) -> nix::Result<(usize, Vec<OwnedFd>)> {
    let mut buffer = [IoSliceMut::new(text)];
    let mut space = cmsg_space!([i32; 253]);
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut buffer, Some(&mut space), flags)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = control {
            // SAFETY: the kernel has just made them for the receiver.
            fds.extend(received.into_iter().map(|fd| unsafe { super::own_received(fd) }));
        }
    }
    Ok((message.bytes, fds))
}

/// Has a child open something, which may enter namespaces for that, and takes it from there.
pub fn open_in_child(open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let (to_parent, from_child) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let child = super::spawn_child(|| {
        let sent = open().and_then(|opened| Ok(send_descriptors(&to_parent, &[1], &[opened.as_raw_fd()])?));
        sent.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0)
    })?;
    let ended = waitpid(child, None);
    drop(to_parent);
    let (_, mut opened) = receive_descriptors(&from_child, &mut [0], MsgFlags::MSG_DONTWAIT)?;
    opened.pop().ok_or_else(|| match ended {
        Ok(WaitStatus::Exited(_, errno)) => io::Error::from_raw_os_error(errno),
        _ => io::ErrorKind::Other.into(),
    })
}
