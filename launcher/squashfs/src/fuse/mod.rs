//! A FUSE server for a squashfs image, on the kernel's protocol directly.
//!
//! The image never changes, so the kernel may keep all that it has ever been told: names (also those that do
//! not exist), attributes, link targets, listings, pages. Opening costs no request at all. A node is the
//! place of its inode in the image, so that the server has no table of nodes to keep, lock or forget.
//!
//! Run by: the user, in the FUSE server process.

mod abi;
mod device;
mod entries;
mod init;
mod operations;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use abi::{Message, Request, answer_head};
use device::Device;
use operations::{Answer, Server};

use crate::squashfs::{Error, Image};

/// Who owns the files that the mount shows.
#[derive(Debug, Clone, Copy)]
pub enum Owner {
    /// Whom the image says.
    Image,
    /// One user and group for all: in a user namespace that maps a single id, others would show as nobody.
    Fixed {
        /// the user
        uid: u32,
        /// the group
        gid: u32,
    },
}

/// Answers the requests for a mounted file system until it is unmounted or the connection is aborted.
///
/// `device` is the descriptor that the file system was mounted with, read-only, with `default_permissions`
/// (the server checks none) and `rootmode=40000`. A process that meets a damaged part of the image gets EIO,
/// which says little, so `report` is told what is wrong, each time.
pub fn serve(
    device: OwnedFd,
    image: Arc<Image>,
    owner: Owner,
    threads: usize,
    report: &(dyn Fn(&Error) + Sync),
) -> io::Result<()> {
    let device = Device::new(device);
    let Some(features) = init::negotiate(&device)? else { return Ok(()) };
    let server = Server::new(image, owner, features);
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        for number in 1..threads {
            // With fewer threads than asked for (a limit on processes, say) the mount is slower, not broken.
            // To fail here would be to wait for ever: the threads already started end with the mount only.
            let Ok(device) = device.another() else { break };
            let server = &server;
            let builder = std::thread::Builder::new().name(format!("fuse-{number}"));
            let Ok(thread) = builder.spawn_scoped(scope, move || answer_requests(&device, server, report))
            else {
                break;
            };
            others.push(thread);
        }
        let mut result = answer_requests(&device, &server, report);
        for thread in others {
            result = result
                .and(thread.join().unwrap_or_else(|_| Err(io::Error::other("a server thread panicked"))));
        }
        result
    })
}

/// What each thread does.
fn answer_requests(device: &Device, server: &Server, report: &dyn Fn(&Error)) -> io::Result<()> {
    let mut buffer = vec![0; abi::REQUEST_BUFFER];
    let mut message = Message::default();
    while let Some(bytes) = device.receive(&mut buffer)? {
        // Too short to know what to answer to: the kernel does not send that.
        let Some(request) = Request::parse(bytes) else { continue };
        message.clear();
        match server.answer(&request, &mut message) {
            Ok(Answer::Message) => send(device, request.unique, 0, &[IoSlice::new(message.bytes())]),
            Ok(Answer::Contents(pieces)) => {
                let slices: Vec<_> =
                    pieces.iter().flat_map(|piece| piece.slices()).map(IoSlice::new).collect();
                send(device, request.unique, 0, &slices);
            }
            Ok(Answer::None) => {}
            Err(failure) => {
                failure.damage().into_iter().for_each(report);
                send(device, request.unique, failure.errno().raw_os_error(), &[]);
            }
        }
    }
    Ok(())
}

fn send(device: &Device, unique: u64, errno: i32, body: &[IoSlice<'_>]) {
    let body_len = body.iter().map(|part| part.len()).sum();
    let head = answer_head(unique, errno, body_len);
    let mut parts = Vec::with_capacity(body.len() + 1);
    parts.push(IoSlice::new(&head));
    parts.extend_from_slice(body);
    device.send(&parts);
}
