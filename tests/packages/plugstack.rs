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

/// Nodes may be made with mizzen before they get Slurm. dpkg then has nothing to ask about plugstack.conf.
#[test]
fn slurm_can_come_after_mizzen() {
    let site = start("before-slurm", |spec| spec);
    // The package of Slurm that has the file, made of what is installed of it: a cluster reaches no mirror.
    let pack = format!(
        "set -e; name=$(dpkg-query --search {PLUGSTACK} | cut -d: -f1); mkdir -p /tmp/slurm/DEBIAN && cd /tmp/slurm; \
         dpkg-query --status $name | sed '/^Status:/d; /^Conffiles:/,/^[^ ]/{{/^Conffiles:/d; /^ /d}}' > DEBIAN/control; \
         for file in /var/lib/dpkg/info/$name.*; do case $file in *.list | *.md5sums) ;; *) cp $file DEBIAN/${{file##*.}} ;; esac; done; \
         tar -C / --no-recursion -cf - -T /var/lib/dpkg/info/$name.list | tar -xf -; dpkg-deb --build . /shared/slurm.deb > /dev/null; \
         cp -a /etc/slurm /tmp/etc; dpkg --purge --force-depends $name > /dev/null 2>&1; rm -rf /etc/slurm/plugstack*; ! test -e {PLUGSTACK}"
    );
    site.root("ctl", &pack);
    site.install("node1", Version::This);
    let package = site.file_name(Version::This);
    let installed = site.root("ctl", &format!("dpkg --install /shared/{package}"));
    assert_says(
        &installed,
        &format!("mizzen: made {PLUGSTACK}, which includes /etc/slurm/plugstack.conf.d/mizzen.conf\n"),
    );
    let slurm =
        site.root("ctl", "dpkg --install /shared/slurm.deb < /dev/null; cp -an /tmp/etc/. /etc/slurm/");
    assert!(!slurm.text().contains("Configuration file"), "{}", slurm.text());
    assert_out(&site.root("ctl", &format!("dpkg --audit; cat {PLUGSTACK}")), 0, &format!("{INCLUDE}\n"));
    assert_out(&site.cluster.run(PLAIN), 0, "node1\n");
    assert_out(&site.cluster.run(CONTAINER), 0, "a\n");
}

/// Whoever has taken the line out before the package went gets it with the package again, and their text with it.
#[test]
fn a_kept_file_without_the_line_gets_it_again() {
    let site = start("plugstack-kept", |spec| spec);
    let line = "/etc/slurm/plugstack.conf.d/mizzen.conf";
    on_both(|machine| site.install(machine, Version::This));
    on_both(|machine| site.root(machine, &format!("printf '# mine' > {line}")));
    on_both(|machine| site.remove(machine));
    on_both(|machine| site.root(machine, &format!("test -e {line}.removed")));
    on_both(|machine| site.install(machine, Version::This));
    let kept = site.root("node1", &format!("cat {line}; ls {line}*"));
    assert_out(&kept, 0, &format!("# mine\n{REQUIRED}\n{line}\n"));
    assert_out(&site.cluster.run(CONTAINER), 0, "a\n");
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
