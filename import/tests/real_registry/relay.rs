//! A bad network between the importer and a registry: the first large answer is cut, and who comes back for the rest waits
//! until its token is too old.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of an answer that get through.
const CUT: usize = 100_000;

#[derive(Default)]
struct Shared {
    lines: Mutex<Vec<String>>,
    has_cut: AtomicBool,
    has_waited: AtomicBool,
}

pub struct Relay {
    pub host: String,
    shared: Arc<Shared>,
}

impl Relay {
    /// To this registry. It lives as long as the test program.
    pub fn start(to: &str, wait: Duration) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay { host: listener.local_addr().unwrap().to_string(), shared: Arc::default() };
        let (to, shared) = (to.to_owned(), Arc::clone(&relay.shared));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(&to) else { continue };
                let (client, server) = (Arc::new(client), Arc::new(server));
                let both = (Arc::clone(&client), Arc::clone(&server), Arc::clone(&shared));
                let other = (client, server, Arc::clone(&shared));
                std::thread::spawn(move || requests(&both.0, &both.1, &both.2, wait));
                std::thread::spawn(move || answers(&other.1, &other.0, &other.2));
            }
        });
        relay
    }

    /// The first lines of requests with Range, and of all answers, in their order.
    pub fn lines(&self) -> Vec<String> {
        self.shared.lines.lock().unwrap().clone()
    }
}

fn requests(client: &TcpStream, server: &TcpStream, shared: &Shared, wait: Duration) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = (&*client).read(&mut buffer) {
        let text = String::from_utf8_lossy(&buffer[..count]).to_ascii_lowercase();
        if text.contains("\r\nrange: bytes=") {
            shared.lines.lock().unwrap().push("range".to_owned());
            if !shared.has_waited.swap(true, Ordering::Relaxed) {
                std::thread::sleep(wait);
            }
        }
        if (&*server).write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
}

fn answers(server: &TcpStream, client: &TcpStream, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    let mut since_head = 0;
    while let Ok(count @ 1..) = (&*server).read(&mut buffer) {
        if buffer.starts_with(b"HTTP/1.1 ") {
            shared.lines.lock().unwrap().push(String::from_utf8_lossy(&buffer[9..12]).into_owned());
            since_head = 0;
        }
        since_head += count;
        if since_head > CUT && !shared.has_cut.swap(true, Ordering::Relaxed) {
            break;
        }
        if (&*client).write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}
