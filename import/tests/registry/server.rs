//! A server that answers as a test says, and remembers what it was asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// One request.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    /// With the query.
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn authorization(&self) -> Option<&str> {
        self.header("authorization")
    }

    /// The port that was asked.
    pub fn port(&self) -> u16 {
        self.header("host").and_then(|host| host.rsplit_once(':')?.1.parse().ok()).unwrap()
    }

    /// Where a Range begins.
    pub fn offset(&self) -> usize {
        let range = self.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
        range.map_or(0, |offset| offset.parse().unwrap())
    }
}

/// How a body is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Manner {
    Whole,
    /// So many bytes, and then the connection is closed.
    Cut(usize),
    /// So many bytes, and then nothing.
    Stall(usize),
    /// A few bytes now and then.
    Drip,
    /// In chunks, without a length.
    Chunked,
}

/// One answer.
#[derive(Clone, Debug)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    manner: Manner,
}

impl Reply {
    pub fn new(status: u16) -> Reply {
        Reply { status, headers: Vec::new(), body: Vec::new(), manner: Manner::Whole }
    }

    pub fn ok(body: impl Into<Vec<u8>>) -> Reply {
        Reply { body: body.into(), ..Reply::new(200) }
    }

    /// A part of a blob, if a part was asked for.
    pub fn ranged(seen: &Seen, body: &[u8]) -> Reply {
        match seen.offset() {
            0 => Reply::ok(body),
            offset => {
                let range = format!("bytes {offset}-{}/{}", body.len() - 1, body.len());
                Reply { status: 206, ..Reply::ok(&body[offset..]) }.header("Content-Range", range)
            }
        }
    }

    /// A part of a blob, with this in the header.
    pub fn ranged_as(part: Vec<u8>, range: &str) -> Reply {
        Reply { status: 206, ..Reply::ok(part) }.header("Content-Range", range)
    }

    pub fn redirect(to: impl Into<String>) -> Reply {
        Reply::new(307).header("Location", to)
    }

    /// What a registry says to be wrong.
    pub fn error(status: u16, code: &str, message: &str) -> Reply {
        let body = format!(r#"{{"errors":[{{"code":"{code}","message":"{message}"}}]}}"#);
        Reply { body: body.into(), ..Reply::new(status) }
    }

    /// 401, and where tokens are.
    pub fn challenge(realm: &str) -> Reply {
        let value = format!(r#"Bearer realm="{realm}",service="the registry",scope="repository:a/b:pull""#);
        Reply::error(401, "UNAUTHORIZED", "authentication required").header("WWW-Authenticate", value)
    }

    pub fn header(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub fn manner(self, manner: Manner) -> Reply {
        Reply { manner, ..self }
    }
}

type Script = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// A server on 127.0.0.1, until it is dropped.
pub struct Server {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// Without TLS.
    pub fn start(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        Server::start_with(None, Arc::new(script))
    }

    /// With this certificate.
    pub fn start_tls(certificate: &str, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        let directory = super::support::certificate("");
        let chain = CertificateDer::from_pem_file(directory.join(certificate)).unwrap();
        let key = PrivateKeyDer::from_pem_file(directory.join("server.key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![chain], key)
            .unwrap();
        Server::start_with(Some(Arc::new(config)), Arc::new(script))
    }

    fn start_with(tls: Option<Arc<ServerConfig>>, script: Script) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let server = Server { address, seen: seen.clone(), stop: stop.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (stream, tls, seen, script) =
                    (stream.unwrap(), tls.clone(), seen.clone(), script.clone());
                std::thread::spawn(move || match tls {
                    None => serve(&mut stream.try_clone().unwrap(), &stream, &seen, &script),
                    Some(config) => {
                        let socket = stream.try_clone().unwrap();
                        let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
                        serve(&mut tls, &socket, &seen, &script);
                    }
                });
            }
        });
        server
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// As a registry's name.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Method, path and Authorization of each request.
    pub fn log(&self) -> Vec<String> {
        let line = |seen: &Seen| {
            let range = seen.header("range").map_or_else(String::new, |range| format!(" {range}"));
            format!("{} {}{range} [{}]", seen.method, seen.path, seen.authorization().unwrap_or(""))
        };
        self.seen().iter().map(line).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes it up.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve<S: Read + Write>(stream: &mut S, socket: &TcpStream, seen: &Mutex<Vec<Seen>>, script: &Script) {
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut reader = BufReader::new(stream);
    while let Some(request) = read_request(&mut reader) {
        let Ok(request) = request else {
            let _ = reader.get_mut().write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
            return;
        };
        seen.lock().unwrap().push(request.clone());
        let reply = script(&request);
        let again = send_reply(reader.get_mut(), &request, &reply);
        if !again.unwrap_or(false) {
            let _ = socket.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// None at the end of the connection, an error for what is not HTTP.
fn read_request(reader: &mut impl BufRead) -> Option<Result<Seen, ()>> {
    let mut bytes = Vec::new();
    if reader.read_until(b'\n', &mut bytes).ok()? == 0 {
        return None;
    }
    let Ok(line) = String::from_utf8(bytes) else { return Some(Err(())) };
    let words: Vec<&str> = line.split_whitespace().collect();
    let [method, path, "HTTP/1.1"] = words.as_slice() else { return Some(Err(())) };
    let mut seen = Seen {
        method: (*method).to_owned(),
        path: (*path).to_owned(),
        headers: Vec::new(),
        body: String::new(),
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        seen.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length = seen.header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    seen.body = String::from_utf8(body).unwrap();
    Some(Ok(seen))
}

/// Whether the connection goes on.
fn send_reply(stream: &mut impl Write, request: &Seen, reply: &Reply) -> std::io::Result<bool> {
    let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let told = reply.headers.iter().any(|(name, _)| name == "Content-Length");
    match reply.manner {
        Manner::Chunked => head.push_str("Transfer-Encoding: chunked\r\n"),
        _ if told => {}
        _ => head.push_str(&format!("Content-Length: {}\r\n", reply.body.len())),
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.flush()?;
    if request.method == "HEAD" {
        return Ok(true);
    }
    match reply.manner {
        Manner::Whole => stream.write_all(&reply.body)?,
        Manner::Cut(length) => {
            stream.write_all(&reply.body[..length.min(reply.body.len())])?;
            stream.flush()?;
            return Ok(false);
        }
        Manner::Stall(length) => {
            stream.write_all(&reply.body[..length.min(reply.body.len())])?;
            stream.flush()?;
            std::thread::sleep(Duration::from_secs(5));
            return Ok(false);
        }
        Manner::Drip => {
            for byte in &reply.body {
                stream.write_all(&[*byte])?;
                stream.flush()?;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Manner::Chunked => {
            for chunk in reply.body.chunks(1000) {
                stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
                stream.write_all(chunk)?;
                stream.write_all(b"\r\n")?;
            }
            stream.write_all(b"0\r\n\r\n")?;
        }
    }
    stream.flush()?;
    Ok(true)
}
