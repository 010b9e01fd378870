//! The protocol without a kernel: a socket pair stands for the device.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::sync::Arc;

use rustix::io::Errno;

use super::Owner;
use super::abi::{Message, Request, answer_head, capability, opcode};
use super::device::Device;
use super::init::{Features, negotiate};
use super::operations::{Answer, Server};
use crate::reader::Image;

fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let mut message = Message::default();
    message.u32s(&[40 + body.len() as u32, opcode]).u64s(&[77, node]).u32s(&[0; 4]).raw(body);
    message.bytes().to_vec()
}

fn init(major: u32, minor: u32, flags: u32) -> Vec<u8> {
    let mut body = Message::default();
    body.u32s(&[major, minor, 131_072, flags]);
    request(opcode::INIT, 0, body.bytes())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Sends the requests to `negotiate`, and gives its result and answers.
fn negotiated(requests: &[Vec<u8>]) -> (std::io::Result<Option<Features>>, Vec<Vec<u8>>) {
    let (kernel, server) = UnixDatagram::pair().unwrap();
    requests.iter().for_each(|request| assert_eq!(kernel.send(request).unwrap(), request.len()));
    let result = negotiate(&Device::new(OwnedFd::from(server)));
    kernel.set_nonblocking(true).unwrap();
    let mut answers = Vec::new();
    let mut buffer = [0; 1000];
    while let Ok(len @ 1..) = kernel.recv(&mut buffer) {
        answers.push(buffer[..len].to_vec());
    }
    (result, answers)
}

#[test]
fn versions_and_capabilities_are_negotiated() {
    let (result, answers) = negotiated(&[init(8, 1, 0), init(7, 38, u32::MAX)]);
    let features = result.unwrap().unwrap();
    assert!(features.no_open && features.no_opendir);
    assert_eq!(answers.len(), 2, "a newer major version asks again");
    assert_eq!((word(&answers[0], 16), answers[0].len()), (7, 80));
    assert_eq!((word(&answers[1], 0), answers[1].len()), (80, 80));
    assert_eq!((word(&answers[1], 16), word(&answers[1], 20), word(&answers[1], 24)), (7, 31, 131_072));

    let (result, answers) = negotiated(&[init(7, 27, capability::ASYNC_READ | 1 << 31)]);
    let features = result.unwrap().unwrap();
    assert!(!features.no_open && !features.no_opendir);
    assert_eq!(word(&answers[0], 28), capability::ASYNC_READ, "only what the kernel offers");

    let (result, answers) = negotiated(&[init(7, 26, 0)]);
    assert_eq!(result.unwrap_err().to_string(), "the kernel speaks FUSE 7.26; at least 7.27 is needed");
    assert_eq!(answers[0], answer_head(77, Errno::PROTO.raw_os_error(), 0));
}

fn server(features: Features) -> Server {
    let dir = std::env::temp_dir().join(format!("sqfs-protocol-{}-{}", std::process::id(), features.no_open));
    fs::create_dir_all(dir.join("tree/directory")).unwrap();
    fs::write(dir.join("tree/file"), "contents").unwrap();
    let image = dir.join("image");
    let arguments =
        [dir.join("tree"), image.clone(), "-noappend".into(), "-quiet".into(), "-no-progress".into()];
    assert!(Command::new("mksquashfs").args(arguments).output().unwrap().status.success());
    let image = Image::open(File::open(image).unwrap(), 0).unwrap();
    fs::remove_dir_all(dir).unwrap();
    Server::new(Arc::new(image), Owner::Image, features, None)
}

fn answer(server: &Server, bytes: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut message = Message::default();
    match server.answer(&Request::parse(bytes).unwrap(), &mut message).map_err(|failure| failure.errno())? {
        Answer::Message => Ok(message.bytes().to_vec()),
        Answer::Contents(pieces) => Ok(pieces.iter().flat_map(|p| p.slices()).flatten().copied().collect()),
        Answer::None => Ok(Vec::new()),
    }
}

#[test]
fn each_kind_of_request_has_its_answer() {
    let server = server(Features { no_open: false, no_opendir: true });
    let entry = answer(&server, &request(opcode::LOOKUP, 1, b"file\0")).unwrap();
    assert_eq!(entry.len(), 128, "struct fuse_entry_out");
    let node = u64::from_ne_bytes(entry[..8].try_into().unwrap());
    let absent = answer(&server, &request(opcode::LOOKUP, 1, b"absent\0")).unwrap();
    assert_eq!((absent.len(), &absent[..8]), (128, &[0; 8][..]));
    let mut range = Message::default();
    range.u64s(&[0, 3]).u32s(&[100, 0]);
    assert_eq!(answer(&server, &request(opcode::READ, node, range.bytes())).unwrap(), b"tents");
    assert_eq!(answer(&server, &request(opcode::GETATTR, node, &[0; 16])).unwrap().len(), 104);
    assert_eq!(answer(&server, &request(opcode::STATFS, 1, &[])).unwrap().len(), 80);
    assert_eq!(word(&answer(&server, &request(opcode::OPEN, node, &[0; 8])).unwrap(), 8), 2);
    assert_eq!(answer(&server, &request(opcode::OPENDIR, 1, &[0; 8])), Err(Errno::NOSYS));
    assert_eq!(answer(&server, &request(opcode::MKDIR, 1, b"x\0")), Err(Errno::ROFS));
    assert_eq!(answer(&server, &request(opcode::READLINK, node, &[])), Err(Errno::INVAL));
    assert_eq!(answer(&server, &request(opcode::LOOKUP, node, b"x\0")), Err(Errno::NOTDIR));
    assert_eq!(answer(&server, &request(opcode::LISTXATTR, node, &[0; 8])), Err(Errno::NOSYS));
    assert_eq!(answer(&server, &request(opcode::GETATTR, 0, &[0; 16])), Err(Errno::STALE));
    assert_eq!(answer(&server, &request(4711, 1, &[])), Err(Errno::NOSYS));
}

#[test]
fn requests_that_no_kernel_sends_do_no_harm() {
    assert!(Request::parse(&[]).is_none());
    assert!(Request::parse(&[0xff; 39]).is_none());
    assert!(Request::parse(&[0xff; 100]).is_none(), "longer than what was read");
    let server = server(Features { no_open: true, no_opendir: true });
    let mut state = 1_u64;
    for _ in 0..20_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let body = [state.to_ne_bytes(), (state >> 7).to_ne_bytes(), (state >> 40).to_ne_bytes()].concat();
        let body = &body[..(state >> 33) as usize % (body.len() + 1)];
        let node = if state & 4 == 0 { state >> 20 } else { 1 + (state >> 50) % 200 };
        let _ = answer(&server, &request((state >> 45) as u32 % 60, node, body));
    }
}
