//! `vcluster fleet`: the Ansible role of packaging/ansible, run by a real Ansible over ssh on a cluster whose machines know nothing of
//! mizzen: it installs, changes nothing when it runs again, refuses what is wrong, and removes.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::images::ImageTree;
use crate::release::fleet_rootfs;
use crate::spec::PLUGIN;
use crate::{Cluster, Output, Release, Spec, User, repository, run_tool, target_dir};

/// Tries the role, in a quarter of an hour on a machine that is busy otherwise.
pub fn run() -> Result<()> {
    lint()?;
    let (begin, release) = (Instant::now(), Release::Slurm22_05);
    try_on(release).with_context(|| format!("the Ansible role on {release}"))?;
    say(&format!("{release}: the role installs, stays quiet, refuses and removes ({:.0?})", begin.elapsed()))
}

/// Where pip has put Ansible.
fn ansible(program: &str) -> PathBuf {
    target_dir().join("ansible/bin").join(program)
}

fn roles() -> PathBuf {
    repository().join("packaging/ansible")
}

/// What Ansible's own checker has to say.
fn lint() -> Result<()> {
    let path = format!("{}:{}", ansible("").canonicalize()?.display(), std::env::var("PATH")?);
    let mut command = Command::new(ansible("ansible-lint").canonicalize()?);
    let words =
        ["--offline", "--strict", "--profile=production", "--nocolor", "site.yml", "remove.yml", "roles"];
    run_tool(command.args(words).current_dir(roles()).env("PATH", path)).map(drop)
}

fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// A cluster, and what Ansible needs to reach it.
struct Fleet {
    cluster: Cluster,
    dir: PathBuf,
}

/// How a playbook ended: how many tasks changed something on each machine, and everything it printed.
struct Played {
    changed: BTreeMap<String, u32>,
    good: bool,
    text: String,
}

impl Fleet {
    fn start(release: Release) -> Result<Fleet> {
        let spec = Spec {
            release,
            rootfs: Some(fleet_rootfs(release)?),
            own_etc_slurm: true,
            layers: Vec::new(),
            ..Cluster::spec(&format!("fleet-{}", release.version()))
        };
        let fleet = Fleet { cluster: Cluster::start(spec)?, dir: new_directory(release)? };
        fleet.cluster.set_plugstack(&["# an administrator's own"])?;
        fleet.open_ssh()?;
        let tree = ImageTree::busybox()?;
        tree.file("where", "inside\n")?;
        fleet.cluster.share("bb.sqsh", &tree.squashfs(&["-comp", "zstd"])?)?;
        Ok(fleet)
    }

    /// A key for root, and a server on every machine that knows it.
    fn open_ssh(&self) -> Result<()> {
        let key = self.file("key");
        run_tool(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key))?;
        let public = fs::read_to_string(key.with_extension("pub"))?;
        let mut inventory = String::new();
        for (index, machine) in ["ctl", "node1", "node2"].into_iter().enumerate() {
            let root = PathBuf::from(format!("/proc/{}/root/root/.ssh", self.cluster.pid_of(machine)));
            fs::create_dir_all(&root)?;
            fs::write(root.join("authorized_keys"), &public)?;
            self.as_root(machine, "mkdir -p /run/sshd && exec /usr/sbin/sshd")?;
            let group = if machine == "ctl" { "login" } else { "compute" };
            inventory.push_str(&format!("[{group}]\n{machine} ansible_host={}\n", Spec::address(index)));
        }
        fs::write(self.file("inventory"), &inventory)?;
        let nobody = inventory.replace(&Spec::address(2), &Spec::address(200));
        fs::write(self.file("inventory-without-node2"), nobody)?;
        Ok(())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn as_root(&self, machine: &str, script: &str) -> Result<String> {
        let done = self.cluster.run_on(machine, User::Root, script);
        ensure!(done.code == 0, "{machine}: {script}: {}", done.text());
        Ok(done.stdout)
    }

    fn play(&self, book: &str, variables: &Value) -> Result<Played> {
        self.play_for("inventory", book, variables)
    }

    /// Runs a playbook in the cluster's network.
    fn play_for(&self, inventory: &str, book: &str, variables: &Value) -> Result<Played> {
        self.play_with(&[&format!("--inventory={}", self.file(inventory).display())], book, variables)
    }

    /// Tells what a playbook would change.
    fn play_checking(&self, book: &str, variables: &Value) -> Result<Played> {
        let inventory = format!("--inventory={}", self.file("inventory").display());
        let played = self.play_with(&[&inventory, "--check"], book, variables)?;
        ensure!(played.good, "{book} --check:\n{}", played.text);
        Ok(played)
    }

    fn play_with(&self, options: &[&str], book: &str, variables: &Value) -> Result<Played> {
        fs::write(self.file("variables.json"), variables.to_string())?;
        let mut command = Command::new("nsenter");
        command
            .args(["--net", &format!("--target={}", self.cluster.pid_of("ctl"))])
            .arg(ansible("ansible-playbook").canonicalize()?)
            .args(options)
            .arg(format!("--extra-vars=@{}", self.file("variables.json").display()))
            .arg(format!("--private-key={}", self.file("key").display()))
            .args(["--user=root", "--forks=3", book])
            .current_dir(roles())
            .stdin(Stdio::null())
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", &self.dir)
            .env("LANG", "C.UTF-8")
            .env("ANSIBLE_HOST_KEY_CHECKING", "False")
            .env("ANSIBLE_PIPELINING", "True")
            .env("ANSIBLE_PYTHON_INTERPRETER", "auto_silent")
            .env("ANSIBLE_NOCOLOR", "1")
            .env(
                "ANSIBLE_SSH_ARGS",
                "-o ControlMaster=auto -o ControlPersist=30 -o UserKnownHostsFile=/dev/null",
            );
        let begin = Instant::now();
        let output = command.output().context("cannot start Ansible")?;
        say(&format!("  {book} took {:.0?}", begin.elapsed()))?;
        let text =
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        Ok(Played { changed: recap(&text), good: output.status.success(), text })
    }

    fn play_well(&self, book: &str, variables: &Value) -> Result<Played> {
        let played = self.play(book, variables)?;
        ensure!(played.good && played.changed.len() == 3, "{book} {variables}:\n{}", played.text);
        Ok(played)
    }

    /// As Alice, until the test ends it.
    fn start_script(&self, machine: &str, script: &str) -> Result<Child> {
        let mut command =
            self.cluster.command(machine, User::Alice, &["timeout", "600", "bash", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("cannot start a script")
    }

    /// As Alice, on the login node.
    fn job(&self, options: &str) -> Output {
        self.cluster.run(&format!("srun -Q -N2 {options} sh -c 'cat /where 2>/dev/null || echo outside'"))
    }

    fn expect_job(&self, options: &str, stdout: &str) -> Result<()> {
        let job = self.job(options);
        ensure!(job.code == 0 && job.stdout == stdout, "srun {options}: {}", job.text());
        Ok(())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A directory for keys, inventories and archives.
fn new_directory(release: Release) -> Result<PathBuf> {
    let dir = target_dir().join(format!("fleet-{}", release.version()));
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    Ok(dir.canonicalize()?)
}

/// The numbers of changed tasks that Ansible tells at the end.
fn recap(text: &str) -> BTreeMap<String, u32> {
    let lines = text.lines().skip_while(|line| !line.starts_with("PLAY RECAP"));
    let counts = lines.filter_map(|line| {
        let (machine, counts) = line.split_once(':')?;
        let changed = counts.split_whitespace().find_map(|word| word.strip_prefix("changed="))?;
        Some((machine.trim().to_owned(), changed.parse().ok()?))
    });
    counts.collect()
}

/// What `make install ENROOT=yes` has installed, as an archive, and the same with another plugin.
fn archives(dir: &Path) -> Result<[PathBuf; 2]> {
    let tree = dir.join("tree");
    run_tool(Command::new("cp").arg("-a").arg(target_dir().join("stage")).arg(&tree))?;
    symlink("mizzen", tree.join("usr/bin/enroot"))?;
    let pack = |name: &str| -> Result<PathBuf> {
        let archive = dir.join(name);
        run_tool(Command::new("tar").arg("-C").arg(&tree).arg("-czf").arg(&archive).arg("."))?;
        Ok(archive)
    };
    let first = pack("mizzen.tar.gz")?;
    // What follows a library's last section is never read.
    let mut plugin = OpenOptions::new().append(true).open(tree.join(&PLUGIN[1..]))?;
    plugin.write_all(b"next")?;
    Ok([first, pack("next.tar.gz")?])
}

/// The package that `make deb` has made.
fn package() -> Result<PathBuf> {
    let files = fs::read_dir(target_dir().join("dist")).context("run `make deb`")?;
    let packages = files.filter_map(|entry| Some(entry.ok()?.path()));
    let package = packages.into_iter().find(|file| file.to_string_lossy().ends_with("_amd64.deb"));
    Ok(package.context("target/dist has no package for Debian: run `make deb`")?.canonicalize()?)
}

const CONTAINER: &str = "--container-image=/shared/bb.sqsh";
const LINE: &str = "/etc/slurm/plugstack.conf.d/mizzen.conf";

fn try_on(release: Release) -> Result<()> {
    let fleet = Fleet::start(release)?;
    let [archive, next] = archives(&fleet.dir)?;
    let site = "image_folders = [\"/shared\"]\n";
    let variables = json!({ "mizzen_archive": archive, "mizzen_drop_ins": { "10-site": site } });
    the_role(&fleet, &variables)?;
    upgrade(&fleet, &variables, &next)?;
    removal(&fleet)?;
    by_package(&fleet, site)?;
    ensure!(fleet.cluster.all_idle(), "{:?}", fleet.cluster.node_states());
    Ok(())
}

fn the_role(fleet: &Fleet, variables: &Value) -> Result<()> {
    // No login node offers what a compute node may lack.
    expect_unreachable(&fleet.play_for("inventory-without-node2", "site.yml", variables)?)?;
    fleet.as_root("ctl", &format!("! test -e {LINE} && ! test -e /usr/bin/mizzen"))?;

    let first = fleet.play_well("site.yml", variables)?;
    ensure!(first.changed.values().all(|changed| *changed > 0), "{}", first.text);
    fleet.expect_job(CONTAINER, "inside\ninside\n")?;
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")?;
    let shown = fleet.as_root("node2", "mizzen config show | grep image_folders")?;
    ensure!(shown.ends_with("# /etc/mizzen/mizzen.d/10-site.toml:1\n"), "{shown}");
    let kept = fleet.as_root("ctl", "cat /etc/slurm/plugstack.conf")?;
    ensure!(kept == "# an administrator's own\ninclude /etc/slurm/plugstack.conf.d/*.conf\n", "{kept}");
    let mode = fleet.as_root("node1", "stat -c '%a %U' /etc/mizzen/mizzen.d/10-site.toml / /usr")?;
    ensure!(mode == "644 root\n755 root\n755 root\n", "{mode}");

    expect_quiet(&fleet.play_well("site.yml", variables)?)?;

    // What an administrator has changed stays, and so do their own drop-ins, unless they are not wanted.
    let edit = "echo 'stage = \"never\"' >> /etc/mizzen/mizzen.toml; echo 'gpu = \"none\"' > /etc/mizzen/mizzen.d/90-own.toml; \
                sed -i 's/^stage = \"auto\"//' /etc/mizzen/mizzen.toml; rm /etc/mizzen/host.d/amd.toml";
    fleet.as_root("node1", edit)?;
    expect_quiet(&fleet.play_well("site.yml", variables)?)?;
    let kept = fleet
        .as_root("node1", "mizzen config show | grep -c -e '^gpu = \"none\"' -e '^stage = \"never\"'")?;
    ensure!(kept == "2\n", "{kept}");
    let mut exclusive = variables.clone();
    exclusive["mizzen_drop_ins_exclusive"] = true.into();
    let cleaned = fleet.play_well("site.yml", &exclusive)?;
    let expected = [("ctl", 0), ("node1", 1), ("node2", 0)].map(|(name, count)| (name.to_owned(), count));
    ensure!(cleaned.changed == BTreeMap::from(expected), "{}", cleaned.text);
    fleet.as_root("node1", "test ! -e /etc/mizzen/mizzen.d/90-own.toml")?;

    // A drop-in that is wrong is not put in its place, and the old one holds.
    let mut wrong = variables.clone();
    wrong["mizzen_drop_ins"] = json!({ "10-site": "image_folder = []\n" });
    let refused = fleet.play("site.yml", &wrong)?;
    let message = "drop-in.toml:1: unknown field `image_folder`";
    ensure!(!refused.good && refused.text.contains(message), "{}", refused.text);
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")?;
    // A node on which containers cannot run is told.
    fleet.as_root("node2", "chmod 600 /dev/fuse")?;
    let unfit = fleet.play("site.yml", variables)?;
    fleet.as_root("node2", "chmod 666 /dev/fuse")?;
    let message = "cannot open /dev/fuse: Permission denied";
    ensure!(!unfit.good && unfit.text.contains(message), "{}", unfit.text);

    // Another mizzen.toml, which the line names, with its own drop-ins.
    let mut elsewhere = variables.clone();
    elsewhere["mizzen_config"] = "/etc/site/containers.toml".into();
    fleet.play_well("site.yml", &elsewhere)?;
    expect_quiet(&fleet.play_well("site.yml", &elsewhere)?)?;
    let shown = fleet.as_root("ctl", "mizzen config show | head -n 2")?;
    let named = "# /etc/site/containers.toml, named by /etc/slurm/plugstack.conf.d/mizzen.conf:1\n";
    ensure!(shown == format!("{named}# /etc/site/containers.d/10-site.toml\n"), "{shown}");
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")?;
    // And back: before that, --check tells what it changes.
    let told = fleet.play_checking("site.yml", variables)?;
    let back = fleet.play_well("site.yml", variables)?;
    let expected = ["ctl", "node1", "node2"].map(|name| (name.to_owned(), 1));
    ensure!(back.changed == BTreeMap::from(expected), "{}", back.text);
    ensure!(told.changed == back.changed, "with --check: {}", told.text);
    Ok(())
}

/// The new plugin comes by rename: at every moment there is a whole one, and jobs run. What is the same stays.
fn upgrade(fleet: &Fleet, variables: &Value, next: &Path) -> Result<()> {
    let files = format!("stat -c %i {PLUGIN} /usr/bin/mizzen; stat -c %s {PLUGIN}");
    let before = fleet.as_root("node1", &files)?;
    fleet.cluster.run("rm -f stop");
    let jobs = "until test -e stop; do srun -Q -N2 true || echo failed; echo job; done";
    let jobs = fleet.start_script("ctl", jobs)?;
    let watch = format!("until [ -e /home/alice/stop ]; do [ -s {PLUGIN} ] || echo gone; done; echo watched");
    let watch = fleet.start_script("node1", &watch)?;
    let mut upgraded = variables.clone();
    upgraded["mizzen_archive"] = json!(next);
    let told = fleet.play_checking("site.yml", &upgraded)?;
    let played = fleet.play_well("site.yml", &upgraded)?;
    fleet.cluster.run("touch stop");
    for (process, line) in [(jobs, "job\n"), (watch, "watched\n")] {
        let output = process.wait_with_output()?;
        let (said, failed) = (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr));
        ensure!(
            said.starts_with(line) && said.replace(line, "").is_empty(),
            "during an upgrade: {said}{failed}"
        );
    }
    let expected = ["ctl", "node1", "node2"].map(|name| (name.to_owned(), 1));
    ensure!(played.changed == BTreeMap::from(expected), "{}", played.text);
    // The playbook has the role twice: for the files, and then for the line. What --check leaves as it is, both find.
    let expected = ["ctl", "node1", "node2"].map(|name| (name.to_owned(), 2));
    ensure!(told.changed == BTreeMap::from(expected), "with --check: {}", told.text);
    let after = fleet.as_root("node1", &files)?;
    let [old, new] = [&before, &after].map(|text| text.lines().collect::<Vec<_>>());
    ensure!(old[0] != new[0] && old[1] == new[1] && old[2] != new[2], "{before}{after}");
    let left = fleet.as_root(
        "node1",
        "find / -xdev -name '*.new' -path '*mizzen*'; ls -d /tmp/*.mizzen /root/*.mizzen 2>/dev/null || true",
    )?;
    ensure!(left.is_empty(), "{left}");
    expect_quiet(&fleet.play_well("site.yml", &upgraded)?)?;
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")
}

/// The line goes before the file, and settings stay until they are not wanted either.
fn removal(fleet: &Fleet) -> Result<()> {
    fleet.as_root(
        "node1",
        "mkdir -p /etc/apparmor.d && ln -s /usr/share/mizzen/apparmor/mizzen /etc/apparmor.d/mizzen",
    )?;
    expect_unreachable(&fleet.play_for("inventory-without-node2", "remove.yml", &json!({}))?)?;
    fleet.as_root("ctl", &format!("! test -e {LINE} && test -e /usr/bin/mizzen"))?;
    fleet.as_root("node1", &format!("test -e {LINE} && test -e /usr/bin/mizzen"))?;
    let removed = fleet.play_well("remove.yml", &json!({}))?;
    ensure!(removed.changed["node2"] > 0, "{}", removed.text);
    fleet.expect_job("", "outside\noutside\n")?;
    let refused = fleet.job(CONTAINER);
    ensure!(refused.code != 0 && refused.stdout.is_empty(), "{}", refused.text());
    let left = fleet.as_root(
        "node1",
        "find / -xdev '(' -name '*mizzen*' -o -path /usr/bin/enroot ')' -not -path '/proc/*' | sort",
    )?;
    ensure!(left == "/etc/mizzen\n/etc/mizzen/mizzen.d\n/etc/mizzen/mizzen.toml\n", "{left}");
    expect_quiet(&fleet.play_well("remove.yml", &json!({}))?)?;
    fleet.play_well("remove.yml", &json!({ "mizzen_purge": true }))?;
    fleet.as_root("node1", "test ! -e /etc/mizzen").map(drop)
}

/// The package puts the line there itself, on compute nodes first.
fn by_package(fleet: &Fleet, site: &str) -> Result<()> {
    let variables = json!({ "mizzen_package": package()?, "mizzen_drop_ins": { "10-site": site } });
    expect_unreachable(&fleet.play_for("inventory-without-node2", "site.yml", &variables)?)?;
    fleet.as_root("ctl", &format!("! test -e {LINE} && ! test -e /usr/bin/mizzen"))?;
    fleet.play_well("site.yml", &variables)?;
    fleet.as_root("node2", "dpkg --verify mizzen && dpkg-query --search /usr/bin/mizzen")?;
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")?;
    expect_quiet(&fleet.play_well("site.yml", &variables)?)?;
    // A command enroot that is not ours stays.
    fleet.as_root("node1", "ln -s /opt/enroot /usr/bin/enroot")?;
    fleet.play_well("remove.yml", &json!({}))?;
    fleet.expect_job("", "outside\noutside\n")?;
    fleet.as_root("node1", "! test -e /usr/bin/mizzen && readlink /usr/bin/enroot")?;
    // The line is gone from what was kept of the file: another installation by hand has it all the same.
    let package = "mizzen.deb";
    fleet.cluster.share(package, &fs::read(variables["mizzen_package"].as_str().context("no path")?)?)?;
    for machine in ["node1", "node2", "ctl"] {
        fleet
            .as_root(machine, &format!("dpkg -i /shared/{package} && grep -q '^required {PLUGIN}' {LINE}"))?;
    }
    fleet.expect_job("--container=bb.sqsh", "inside\ninside\n")
}

/// Nobody went on without the node that could not be reached.
fn expect_unreachable(played: &Played) -> Result<()> {
    ensure!(
        !played.good && played.text.contains("node2") && played.text.contains("UNREACHABLE!"),
        "{}",
        played.text
    );
    Ok(())
}

fn expect_quiet(played: &Played) -> Result<()> {
    if played.changed.values().all(|changed| *changed == 0) {
        return Ok(());
    }
    bail!("a second run changes something:\n{}", played.text)
}
