//! A FUSE server for a squashfs image, on the kernel's protocol directly.
//!
//! The image never changes, so the kernel may keep all that it has ever been told: names (also those that do
//! not exist), attributes, link targets, listings, pages. Opening costs no request at all. A node is the
//! place of its inode in the image, so that the server has no table of nodes to keep, lock or forget.
//!
//! Run by: the user, in the FUSE server process.

mod abi;
mod ahead;
mod device;
mod entries;
pub mod filter;
mod init;
mod operations;
mod recorder;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use abi::{Message, Request, answer_head};
use device::{Device, Spare};
use operations::{Answer, Server};
pub use recorder::{Access, Phase, Recorder};

use crate::reader::{Error, Image, InodeRef};

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

/// A part of the image that cannot be read and that somebody waits for.
pub struct Damage<'a> {
    /// What is wrong.
    pub error: &'a Error,
    /// The file or directory that was asked for; None for the root.
    pub node: Option<InodeRef>,
}

/// What a server of a mounted file system begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// A new one.
    New,
    /// That of a server which has ended. The kernel must be Linux 5.1 or newer.
    Resumed,
}

/// The threads of a server, as long as it may still open files.
pub struct Workers {
    threads: usize,
    spares: Vec<Spare>,
}

impl Workers {
    /// Prepares so many.
    pub fn new(threads: usize) -> Workers {
        Workers { threads, spares: Spare::open(threads.saturating_sub(1)) }
    }

    /// So many that share one queue of requests: what they have taken and not answered when they end can be had by the next
    /// server ([`Connection::Resumed`]).
    pub fn with_one_queue(threads: usize) -> Workers {
        Workers { threads, spares: Vec::new() }
    }
}

/// The same connection with a queue of its own: what another server has taken and not answered fails when that ends. For kernels
/// that cannot send it again (before Linux 6.9), where its askers would wait for ever. `spare` is /dev/fuse, opened in the same user
/// namespace as the other one: those kernels join no others.
pub fn with_own_queue(device: OwnedFd, spare: OwnedFd) -> io::Result<OwnedFd> {
    Device::new(device).join(Spare::new(spare))
}

/// Answers the requests for a mounted file system until it is unmounted or the connection is aborted.
///
/// `device` is the descriptor that the file system was mounted with, read-only, with `default_permissions`
/// (the server checks none) and `rootmode=40000`. A process that meets a damaged part of the image gets EIO,
/// which says little, so `report` is told before that what is wrong, each time. (Not when the kernel reads ahead: what
/// nobody asked for harms nobody.) What is read is told to the recorder, if there is one.
pub fn serve(
    device: OwnedFd,
    connection: Connection,
    image: Arc<Image>,
    owner: Owner,
    workers: Workers,
    recorder: Option<Arc<Recorder>>,
    report: &(dyn Fn(&Damage) + Sync),
) -> io::Result<()> {
    let Workers { threads, spares } = workers;
    let device = Device::new(device);
    let features = match connection {
        Connection::New => match init::negotiate(&device)? {
            Some(features) => features,
            None => return Ok(()),
        },
        Connection::Resumed => init::resume(&device),
    };
    let server = Server::new(image, owner, features, recorder);
    std::thread::scope(|scope| {
        let mut others = Vec::new();
        let mut spares = spares.into_iter();
        for _ in 1..threads {
            // With fewer threads than asked for (a limit on processes, say) the mount is slower, not broken.
            // To fail here would be to wait for ever: the threads already started end with the mount only.
            let device = device.another(spares.next());
            let server = &server;
            let work = move || answer_requests(&device, server, report);
            let Ok(thread) = std::thread::Builder::new().spawn_scoped(scope, work) else { break };
            others.push(thread);
        }
        // Without them the mount is slower, not broken.
        for _ in 0..server.ahead.threads(threads) {
            let server = &server;
            let _ = std::thread::Builder::new().spawn_scoped(scope, || server.ahead.decode(&server.image));
        }
        let mut result = answer_requests(&device, &server, report);
        for thread in others {
            result = result
                .and(thread.join().unwrap_or_else(|_| Err(io::Error::other("a server thread panicked"))));
        }
        server.ahead.close();
        result
    })
}

/// What each thread does.
fn answer_requests(device: &Device, server: &Server, report: &dyn Fn(&Damage)) -> io::Result<()> {
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
                if let Some(error) = failure.damage()
                    && server.is_wanted(&request)
                {
                    report(&Damage { error, node: entries::reference_of(request.node).ok().flatten() });
                }
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
