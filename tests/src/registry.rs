//! A real registry on a cluster: Debian's docker-registry, filled by umoci and skopeo.
//!
//! It is filled on this machine's loopback, and what it has stored is then moved to the cluster, whose network nobody outside
//! reaches.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::images::ImageTree;
use crate::{Cluster, User, run_tool};

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

    /// Moves what it has stored to a cluster's login node, and runs it there as a registry at this address. With a file of
    /// htpasswd it asks for a password.
    pub fn move_to(&self, cluster: &Cluster, port: u16, htpasswd: Option<&str>) -> Result<()> {
        let tar =
            Command::new("tar").arg("-C").arg(self.directory.path("data")).args(["-c", "."]).output()?;
        cluster.share(&format!("registry-{port}.tar"), &tar.stdout)?;
        cluster.share("docker-registry", &fs::read(PROGRAM)?)?;
        let home = format!("/var/lib/registry-{port}");
        let auth = match htpasswd {
            None => String::new(),
            Some(text) => {
                cluster.share("htpasswd", text.as_bytes())?;
                "auth: {htpasswd: {realm: test, path: /shared/htpasswd}}\n".to_owned()
            }
        };
        let text = config(&Path::new(&home).join("data"), &format!(":{port}"), &auth);
        cluster.share(&format!("registry-{port}.yml"), text.as_bytes())?;
        let started = cluster.run_on(
            "ctl",
            User::Root,
            &format!(
                "mkdir -p {home}/data && tar -C {home}/data -xf /shared/registry-{port}.tar && chmod 755 /shared/docker-registry && \
                 (setsid /shared/docker-registry serve /shared/registry-{port}.yml > /shared/registry-{port}.log 2>&1 < /dev/null &) ; \
                 for i in $(seq 100); do grep -q 'listening on' /shared/registry-{port}.log && exit 0; sleep 0.1; done; exit 1"
            ),
        );
        anyhow::ensure!(started.code == 0, "{}", started.text());
        Ok(())
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

/// Waits a moment: the registry writes its log after its answer.
pub fn requests(cluster: &Cluster, port: u16, pattern: &str) -> Vec<String> {
    std::thread::sleep(Duration::from_millis(300));
    let log = cluster.run_as_root(&format!("cat /shared/registry-{port}.log")).stdout;
    let requests = log.lines().filter(|line| line.contains("response completed"));
    let path = |line: &str| {
        let field = |name: &str| {
            let rest = line.split_once(&format!("{name}="))?.1;
            Some(rest.trim_start_matches('"').split(['"', ' ']).next()?.to_owned())
        };
        Some(format!("{} {}", field("http.request.method")?, field("http.request.uri")?))
    };
    requests.filter_map(path).filter(|request| request.contains(pattern)).collect()
}
