//! Nodes without files of Slurm's own, which slurmctld sends them (`slurmd --conf-server`): what of the plugin's configuration
//! comes with these, and what has to be on each node.

use mizzen_tests::check::{assert_out, one_node, with_images};
use mizzen_tests::spec::PLUGIN;
use mizzen_tests::{Cluster, Release, Spec, User, on_every_release};

on_every_release!(sends_the_plugins_line);

/// Runs in the container or says that it does not.
const JOB: &str = "srun -Q --container-image=/shared/a.sqsh sh -c 'cat /image 2>/dev/null || hostname'";

/// Changes the controller's files, and waits until the node has them.
fn reconfigure(cluster: &Cluster, script: &str) {
    let cache = format!("/proc/{}/root/var/spool/slurmd/conf-cache/plugstack.conf", cluster.pid_of("node1"));
    let done = cluster.run_as_root(&format!("cd /etc/slurm && {script} && scontrol reconfigure"));
    assert_eq!(done.code, 0, "{}", done.text());
    let sent = || std::fs::read(&cache).unwrap_or_default();
    let own =
        std::fs::read(format!("/proc/{}/root/etc/slurm/plugstack.conf", cluster.pid_of("ctl"))).unwrap();
    let comes = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        sent() == own
    });
    assert!(comes, "{}: the node has {:?}", cluster.release(), String::from_utf8_lossy(&sent()));
}

fn sends_the_plugins_line(release: Release) {
    let cluster = with_images(Spec { configless: true, ..one_node(release, "configless") });
    let on_node = |script: &str| cluster.run_on("node1", User::Alice, script);
    assert_out(&on_node("ls /etc/slurm/slurm.conf 2>/dev/null; srun -Q hostname"), 0, "node1\n");
    // plugstack.conf comes with the others, and what it says holds; also for who calls srun there, and by hand in a job.
    assert_out(&cluster.run(JOB), 0, "a\n");
    assert_out(&on_node(JOB), 0, "a\n");
    let sites = "/etc/mizzen/site.toml";
    cluster.write_everywhere(sites, "image_folders = [\"/shared\"]\n").unwrap();
    reconfigure(&cluster, &format!("echo 'required {PLUGIN} config={sites}' > plugstack.conf"));
    let show = "mizzen config show | head -n 1";
    assert_out(&on_node(show), 0, "# /etc/mizzen/site.toml, named by /run/slurm/conf/plugstack.conf:1\n");
    let in_job = "# /etc/mizzen/site.toml, named by /var/spool/slurmd/conf-cache/plugstack.conf:1\n";
    assert_out(&cluster.run(&format!("srun -Q sh -c '{show}'")), 0, in_job);
    assert_out(&cluster.run("srun -Q --container-image=a.sqsh cat /image"), 0, "a\n");
    // mizzen.toml and its drop-ins do not come: each node has its own.
    let node_only = "mkdir -p /etc/mizzen/site.d; echo 'env = [\"A=node\"]' > /etc/mizzen/site.d/x.toml";
    assert_eq!(cluster.run_on("node1", User::Root, node_only).code, 0);
    let variable = "srun -Q --container-image=/shared/a.sqsh sh -c 'echo $A'";
    assert_out(&cluster.run(variable), 0, "node\n");
    // A file that plugstack.conf includes by its bare name: since 23.11 it is sent, too. Where it is not, nothing on the node
    // loads the plugin, Slurm runs the job there, and the doctor says why.
    let sends_includes = matches!(release, Release::Slurm24_11 | Release::Slurm26_05);
    reconfigure(&cluster, "mv plugstack.conf mizzen.conf && echo 'include mizzen.conf' > plugstack.conf");
    let node = if sends_includes { "a\n" } else { "node1\n" };
    assert_out(&cluster.run(JOB), 0, node);
    let doctor = on_node("mizzen doctor");
    let missing = "/run/slurm/conf/plugstack.conf has no line with spank_mizzen.so";
    assert_eq!(
        (doctor.code == 0, doctor.stdout.contains(missing)),
        (sends_includes, !sends_includes),
        "{}",
        doctor.text()
    );
    // A pattern is never sent; what it means is looked for on the node.
    reconfigure(
        &cluster,
        "mkdir plugstack.conf.d && mv mizzen.conf plugstack.conf.d && echo 'include plugstack.conf.d/*.conf' > plugstack.conf",
    );
    assert_out(&cluster.run(JOB), 0, "node1\n");
    reconfigure(&cluster, "echo 'include /etc/slurm/plugstack.conf.d/*.conf' > plugstack.conf");
    let nodes_own = format!(
        "rm /etc/slurm/plugstack.conf.d/*; echo 'required {PLUGIN}' > /etc/slurm/plugstack.conf.d/m.conf"
    );
    assert_eq!(cluster.run_on("node1", User::Root, &nodes_own).code, 0);
    assert_out(&cluster.run(JOB), 0, "a\n");
    assert_out(&on_node(show), 0, "# /etc/mizzen/mizzen.toml\n");
    assert_out(&on_node("mizzen doctor | grep -c spank_mizzen.so,"), 0, "1\n");
    assert!(cluster.all_idle(), "{release}: {:?}", cluster.node_states());
    clients_fetch_it_too(&cluster);
}

/// On a machine without slurmd each client fetches the files for itself, plugstack.conf among them. What is in /etc/slurm without a
/// slurm.conf means nothing, and commands of mizzen cannot know what the line says.
fn clients_fetch_it_too(cluster: &Cluster) {
    reconfigure(cluster, &format!("echo 'required {PLUGIN} config=/etc/mizzen/site.toml' > plugstack.conf"));
    let local = "rm /run/slurm/conf; echo 'required /nowhere.so' > /etc/slurm/plugstack.conf";
    assert_eq!(cluster.run_on("node1", User::Root, local).code, 0);
    let client = |script: &str| {
        cluster.run_on("node1", User::Alice, &format!("export SLURM_CONF_SERVER=ctl; {script}"))
    };
    assert_out(&client(JOB), 0, "a\n");
    assert_out(&client("srun -Q --container-image=a.sqsh cat /image"), 0, "a\n");
    assert_out(&client("mizzen config show | head -n 1"), 0, "# /etc/mizzen/mizzen.toml\n");
    assert_out(&client("mizzen doctor | grep -c 'plugin          no slurm.conf on this machine'"), 0, "1\n");
}
