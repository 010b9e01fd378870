//! Debian's docker-registry on a free port, filled by skopeo or request by request.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::layout::digest;
use super::{Scratch, run};

/// A registry, until it is dropped.
pub struct Registry {
    process: Child,
    /// `127.0.0.1:PORT`.
    pub host: String,
    scratch: Scratch,
}

impl Registry {
    /// Without TLS and without passwords.
    pub fn start() -> Registry {
        Registry::start_with("", "")
    }

    /// With these settings of its http section, and of its own.
    pub fn start_with(http: &str, more: &str) -> Registry {
        let scratch = Scratch::new();
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            let (config, log) = (scratch.path().join("config.yml"), scratch.path().join("log"));
            let text = format!(
                "version: 0.1\nlog: {{level: info, formatter: text}}\n\
                 storage: {{filesystem: {{rootdirectory: {}}}}}\n\
                 http: {{addr: '{host}'{http}}}\nvalidation: {{manifests: {{urls: {{allow: ['^http://127']}}}}}}\n{more}",
                scratch.path().join("data").display()
            );
            fs::write(&config, text).unwrap();
            let mut process = Command::new("docker-registry")
                .args([Path::new("serve"), &config])
                .stderr(File::create(&log).unwrap())
                .stdout(Stdio::null())
                .spawn()
                .expect("docker-registry is needed: apt-get install docker-registry");
            let begin = Instant::now();
            // Another program may have taken the port in the meantime: then it ends, and the next one is tried.
            while process.try_wait().unwrap().is_none() {
                if fs::read_to_string(&log).unwrap().contains("listening on") {
                    return Registry { process, host, scratch };
                }
                assert!(begin.elapsed() < Duration::from_secs(30), "docker-registry does not start");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("docker-registry: {}", fs::read_to_string(scratch.path().join("log")).unwrap());
    }

    /// What mizzen.toml says of it.
    pub fn plain_config(&self) -> String {
        format!("[registries.\"{}\"]\nplain_http = true\n", self.host)
    }

    /// An image's name in it.
    pub fn reference(&self, name: &str) -> String {
        format!("docker://{}/{name}", self.host)
    }

    /// Copies an image of a layout into it with skopeo.
    pub fn push(&self, layout: &Path, name: &str, to: &str, options: &[&str]) {
        let from = format!("oci:{}:{name}", layout.display());
        let mut skopeo = Command::new("skopeo");
        skopeo.env("HOME", self.scratch.path()).args(["copy", "--quiet", "--insecure-policy"]).args(options);
        run(skopeo.args([from, self.reference(to)]));
    }

    /// Stores a blob.
    pub fn put_blob(&self, repository: &str, bytes: &[u8]) {
        let started = request(&self.host, "POST", &format!("/v2/{repository}/blobs/uploads/"), "", b"");
        let location = started.header("location").unwrap_or_else(|| panic!("{}", started.head));
        let path = location.split_once(&self.host).map_or(location, |(_, path)| path);
        let path = format!("{path}&digest={}", digest(bytes));
        let stored = request(&self.host, "PUT", &path, "application/octet-stream", bytes);
        assert_eq!(stored.status, 201, "{}", stored.head);
    }

    /// Stores a manifest; returns what the registry says to it.
    pub fn put_manifest(&self, repository: &str, tag: &str, media_type: &str, text: &str) -> Answer {
        let path = format!("/v2/{repository}/manifests/{tag}");
        request(&self.host, "PUT", &path, media_type, text.as_bytes())
    }

    /// The manifest of an image.
    pub fn manifest(&self, repository: &str) -> Value {
        let answer = request(&self.host, "GET", &format!("/v2/{repository}/manifests/latest"), "", b"");
        assert_eq!(answer.status, 200, "{}", answer.head);
        serde_json::from_slice(&answer.body).unwrap()
    }

    /// How often each blob was fetched: method and digest of every request.
    pub fn log(&self) -> String {
        // It writes its log after its answer.
        std::thread::sleep(Duration::from_millis(200));
        fs::read_to_string(self.scratch.path().join("log")).unwrap()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a server said.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let is_it = |line: &&str| line.split_once(':').is_some_and(|(key, _)| key.eq_ignore_ascii_case(name));
        self.head.lines().find(is_it).and_then(|line| Some(line.split_once(':')?.1.trim()))
    }
}

const ACCEPT: &str =
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json";

/// One request, on a connection of its own.
pub fn request(host: &str, method: &str, path: &str, media_type: &str, body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAccept: {ACCEPT}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    Answer { status, head, body: answer.split_off(end + 4) }
}
