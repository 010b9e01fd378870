//! A token server, as registries name it: it knows one user, and signs what docker-registry accepts.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use crate::common::{Scratch, run};
use crate::server::{Reply, Seen, Server};

/// docker-registry takes tokens for so long after their end: clocks differ.
const LEEWAY: u64 = 60;
const SERVICE: &str = "the tests' registry";
const ISSUER: &str = "the tests";

pub struct TokenServer {
    server: Server,
    scratch: Scratch,
}

impl TokenServer {
    /// For the user `me` with the password `secret`. Its tokens are good for so many seconds, whatever it says of them.
    pub fn start(seconds: u64) -> TokenServer {
        let scratch = Scratch::new();
        run(Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=the tests"])
            .args(["-keyout", "key.pem", "-out", "certificate.pem"])
            .current_dir(scratch.path()));
        let directory = scratch.path().to_owned();
        let server = Server::start(move |seen| answer(seen, &directory, seconds));
        TokenServer { server, scratch }
    }

    /// What docker-registry must know of it.
    pub fn config(&self) -> String {
        format!(
            "auth: {{token: {{realm: '{}', service: \"{SERVICE}\", issuer: '{ISSUER}', rootcertbundle: {}}}}}\n",
            self.server.url("/token"),
            self.scratch.path().join("certificate.pem").display()
        )
    }

    /// How many tokens it has given.
    pub fn requests(&self) -> Vec<String> {
        self.server.log()
    }
}

fn answer(seen: &Seen, directory: &Path, seconds: u64) -> Reply {
    let basic = format!("Basic {}", STANDARD.encode("me:secret"));
    if seen.authorization() != Some(&basic) {
        return Reply::error(401, "UNAUTHORIZED", "who are you?");
    }
    let query = seen.path.split_once('?').map_or("", |(_, query)| query);
    let scopes = query.split('&').filter_map(|pair| pair.strip_prefix("scope="));
    let access: Vec<Value> = scopes.filter_map(|scope| access(&decoded(scope))).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = json!({
        "iss": ISSUER, "sub": "me", "aud": SERVICE, "jti": now.to_string(), "iat": now - LEEWAY, "nbf": now - LEEWAY,
        "exp": now - LEEWAY + seconds, "access": access,
    });
    Reply::ok(json!({ "token": signed(&claims, directory), "expires_in": 300 }).to_string())
}

/// `repository:NAME:ACTION,ACTION`.
fn access(scope: &str) -> Option<Value> {
    let (kind, rest) = scope.split_once(':')?;
    let (name, actions) = rest.rsplit_once(':')?;
    Some(json!({ "type": kind, "name": name, "actions": actions.split(',').collect::<Vec<_>>() }))
}

fn decoded(text: &str) -> String {
    text.replace("%3A", ":").replace("%2F", "/").replace("%2C", ",").replace("%3a", ":").replace("%2f", "/")
}

/// A JSON web token with the certificate in its header.
fn signed(claims: &Value, directory: &Path) -> String {
    let pem = fs::read_to_string(directory.join("certificate.pem")).unwrap();
    let certificate: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    let header = json!({ "typ": "JWT", "alg": "RS256", "x5c": [certificate] });
    let [header, claims] = [&header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
    let text = format!("{header}.{claims}");
    let signature = sign(text.as_bytes(), &directory.join("key.pem"));
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn sign(text: &[u8], key: &PathBuf) -> Vec<u8> {
    let mut openssl = Command::new("openssl")
        .args(["dgst", "-sha256", "-sign"])
        .arg(key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    openssl.stdin.take().unwrap().write_all(text).unwrap();
    let output = openssl.wait_with_output().unwrap();
    assert!(output.status.success());
    output.stdout
}
