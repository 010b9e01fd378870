//! A real registry on a cluster: Debian's docker-registry, filled by umoci and skopeo.
//!
//! It is filled on this machine's loopback, and what it has stored is then served in the network of the cluster, which nobody
//! outside reaches.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::images::ImageTree;
use crate::{Cluster, run_tool};

const PROGRAM: &str = "/usr/bin/docker-registry";

/// An OCI layout that gets images.
pub struct Layout {
    tree: ImageTree,
}

impl Layout {
    /// An empty one.
    pub fn new() -> Result<Layout> {
        let tree = ImageTree::empty()?;
        run_tool(Command::new("umoci").args(["init", "--layout"]).arg(tree.path("oci")))
            .context("umoci is needed: apt-get install umoci")?;
        Ok(Layout { tree })
    }

    /// An image with one layer for each tree, and these settings of umoci's (`--config.env=A=b`).
    pub fn image(&self, tag: &str, layers: &[&ImageTree], config: &[&str]) -> Result<()> {
        let image = format!("{}:{tag}", self.path().display());
        run_tool(Command::new("umoci").args(["new", "--image", &image]))?;
        for layer in layers {
            let source = layer.path("").canonicalize()?;
            run_tool(Command::new("umoci").args(["insert", "--image", &image]).arg(source).arg("/"))?;
        }
        if !config.is_empty() {
            run_tool(Command::new("umoci").args(["config", "--image", &image]).args(config))?;
        }
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.tree.path("oci")
    }
}

/// A registry on this machine's loopback; it ends when it is dropped.
pub struct LocalRegistry {
    process: Child,
    directory: ImageTree,
    port: u16,
}

impl LocalRegistry {
    /// Starts an empty one.
    pub fn start() -> Result<LocalRegistry> {
        let directory = ImageTree::empty()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        directory.file("config.yml", &config(&directory.path("data"), &format!("127.0.0.1:{port}"), ""))?;
        let mut process = Command::new(PROGRAM)
            .arg("serve")
            .arg(directory.path("config.yml"))
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("docker-registry is needed: apt-get install docker-registry")?;
        let mut log = BufReader::new(process.stderr.take().context("no pipe")?);
        let mut line = String::new();
        while log.read_line(&mut line)? > 0 && !line.contains("listening on") {
            line.clear();
        }
        // It must not wait for somebody to read the rest.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Ok(LocalRegistry { process, directory, port })
    }

    /// Its host and port.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Copies an image into it, with these options of skopeo's.
    pub fn push(&self, layout: &Layout, tag: &str, name: &str, options: &[&str]) -> Result<()> {
        let from = format!("oci:{}:{tag}", layout.path().display());
        let to = format!("docker://{}/{name}", self.address());
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"]).args(options);
        run_tool(skopeo.args([from, to])).context("skopeo is needed: apt-get install skopeo")?;
        Ok(())
    }

    /// Serves what it has stored on a cluster's login node, at this port. With a file of htpasswd it asks for a password.
    pub fn serve_on(&self, cluster: &Cluster, port: u16, htpasswd: Option<&str>) -> Result<ClusterRegistry> {
        let (data, logs) = (self.directory.path("data"), ImageTree::empty()?);
        let auth = match htpasswd {
            None => String::new(),
            Some(text) => {
                logs.file("htpasswd", text)?;
                format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", logs.path("htpasswd").display())
            }
        };
        logs.file("config.yml", &config(&data, &format!(":{port}"), &auth))?;
        let log = fs::File::create(logs.path("log"))?;
        // A program of this machine in the cluster's network: the cluster's own system may be too old for it.
        let process = Command::new("nsenter")
            .args(["--target", &cluster.pid_of("ctl").to_string(), "--net", PROGRAM, "serve"])
            .arg(logs.path("config.yml"))
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let registry = ClusterRegistry { process, logs };
        for _ in 0..100 {
            if registry.log().contains("listening on") {
                return Ok(registry);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        anyhow::bail!("the registry does not start: {}", registry.log())
    }
}

/// A registry on a cluster's login node; it ends when it is dropped.
pub struct ClusterRegistry {
    process: Child,
    logs: ImageTree,
}

impl ClusterRegistry {
    fn log(&self) -> String {
        fs::read_to_string(self.logs.path("log")).unwrap_or_default()
    }

    /// What was asked for so far: method and path of those that have this in them.
    pub fn requests(&self, pattern: &str) -> Vec<String> {
        // It writes its log after its answer.
        std::thread::sleep(Duration::from_millis(300));
        let log = self.log();
        let requests = log.lines().filter(|line| line.contains("response completed"));
        let request = |line: &str| {
            let field = |name: &str| {
                let rest = line.split_once(&format!("{name}="))?.1;
                Some(rest.trim_start_matches('"').split(['"', ' ']).next()?.to_owned())
            };
            Some(format!("{} {}", field("http.request.method")?, field("http.request.uri")?))
        };
        requests.filter_map(request).filter(|request| request.contains(pattern)).collect()
    }
}

impl Drop for ClusterRegistry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for LocalRegistry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn config(data: &Path, address: &str, auth: &str) -> String {
    format!(
        "version: 0.1\nlog: {{level: info, formatter: text}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
         http: {{addr: '{address}'}}\n{auth}",
        data.display()
    )
}
