//! The line in plugstack.conf where Slurm is not configured as Debian leaves it.

use mizzen_tests::check::assert_out;
use mizzen_tests::{Output, Release, Spec, User};

use crate::site::{Site, Tool, Version};

const PLUGSTACK: &str = "/etc/slurm/plugstack.conf";
const INCLUDE: &str = "include /etc/slurm/plugstack.conf.d/*.conf";
const REQUIRED: &str = "required /usr/lib/mizzen/spank_mizzen.so";
const PLAIN: &str = "srun -Q hostname";
const CONTAINER: &str = "srun -Q --container=/shared/a.sqsh cat /image";

fn start(name: &str, spec: impl FnOnce(Spec) -> Spec) -> Site {
    Site::start(Tool::Apt, spec(Spec { nodes: 1, ..Site::spec(name, Release::Slurm22_05, None) }))
}

fn on_both(act: impl Fn(&str) -> Output) -> [Output; 2] {
    ["node1", "ctl"].map(act)
}

#[track_caller]
fn assert_says(output: &Output, message: &str) {
    // apt shows what packages say on its own standard output, where lines end as on a terminal.
    let said = output.text().replace('\r', "");
    assert!(said.contains(message), "expected: {message}\n{said}");
}

#[test]
fn a_plugstack_conf_without_the_include_is_left_alone() {
    let site = start("plugstack-own", |spec| spec);
    let own = "# of this site\n";
    on_both(|machine| site.root(machine, &format!("printf '{own}' > {PLUGSTACK}")));
    for output in on_both(|machine| site.install(machine, Version::This)) {
        let told = format!(
            "mizzen: {PLUGSTACK} does not include /etc/slurm/plugstack.conf.d/mizzen.conf; add this line to it: {INCLUDE}\n"
        );
        assert_says(&output, &told);
    }
    assert_out(&site.root("ctl", &format!("cat {PLUGSTACK}")), 0, own);
    on_both(|machine| site.root(machine, &format!("echo '{INCLUDE}' >> {PLUGSTACK}")));
    assert_out(&site.cluster.run(CONTAINER), 0, "a\n");
}

#[test]
fn a_plugstack_conf_that_was_removed_is_not_made_again() {
    let site = start("plugstack-removed", |spec| spec);
    site.root("ctl", &format!("rm {PLUGSTACK}"));
    let told = format!(
        "mizzen: {PLUGSTACK}, which Slurm's package brings, was removed here; make it again with this line: {INCLUDE}\n"
    );
    assert_says(&site.install("ctl", Version::This), &told);
    site.root("ctl", &format!("! test -e {PLUGSTACK}"));
    assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
}

/// One /etc/slurm for all machines: what one of them writes there, all read at once.
#[test]
fn a_shared_plugstack_conf_is_left_to_the_administrator() {
    let site = start("plugstack-shared", |spec| Spec { own_etc_slurm: false, ..spec });
    for output in on_both(|machine| site.install(machine, Version::This)) {
        assert_says(
            &output,
            "mizzen: /etc/slurm is on a file system of its own, so other machines may read it: nothing in it was changed\n",
        );
        let told =
            format!("mizzen: once every node has mizzen, add this line to plugstack.conf: {REQUIRED}\n");
        assert_says(&output, &told);
        assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
    }
    site.cluster.set_plugstack(&[REQUIRED]).unwrap();
    assert_out(&site.cluster.run(CONTAINER), 0, "a\n");
    cannot_be_removed(&site, PLUGSTACK);
    site.cluster.set_plugstack(&[]).unwrap();
    on_both(|machine| site.remove(machine));
    assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
}

/// Without the plugin, such a line would end every job.
#[test]
fn a_line_of_the_administrators_own_keeps_the_package() {
    let site = start("plugstack-line", |spec| spec);
    on_both(|machine| site.install(machine, Version::This));
    let own = "/etc/slurm/plugstack.conf.d/site.conf";
    let to_own = format!("mv /etc/slurm/plugstack.conf.d/mizzen.conf {own}");
    on_both(|machine| site.root(machine, &to_own));
    cannot_be_removed(&site, own);
    // A site may have named another file than plugstack.conf.
    let elsewhere = "mv /etc/slurm/plugstack.conf.d/site.conf /etc/slurm/stack; echo PlugStackConfig=/etc/slurm/stack >> /etc/slurm/slurm.conf";
    on_both(|machine| site.root(machine, elsewhere));
    cannot_be_removed(&site, "/etc/slurm/stack");
    on_both(|machine| site.root(machine, "sed -i /mizzen/d /etc/slurm/stack"));
    on_both(|machine| site.remove(machine));
    assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
}

#[track_caller]
fn cannot_be_removed(site: &Site, file: &str) {
    let refused = site.cluster.run_on("node1", User::Root, site.remove_command());
    assert_eq!(refused.code, 100, "{}", refused.text());
    assert_says(
        &refused,
        "mizzen: without the plugin, Slurm would fail every job here while this is in its configuration; remove it first:\n",
    );
    assert_says(&refused, &format!("mizzen: {file}:{REQUIRED}\n"));
    // It is as it was.
    site.root("node1", "dpkg --audit; mizzen --version");
    assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
    assert_out(&site.cluster.run(CONTAINER), 0, "a\n");
}
