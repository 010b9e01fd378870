//! What the tests of copies that all users share start from and assert.

use crate::check::with_images;
use crate::{Cluster, Output, SharedFs, Spec, User};

/// Where root keeps them.
pub const CACHE: &str = "/var/cache/mizzen";
/// FUSE counts as a network file system here.
pub const TOML: &str =
    "network_file_systems = [\"fuse\"]\nstage_keep_free = \"\"\nstage_shared = \"/var/cache/mizzen\"\n";

/// One node and the images /shared/a.sqsh and /shared/b.sqsh on FUSE.
pub fn cluster(name: &str, toml: &str) -> Cluster {
    with_images(Spec {
        nodes: 1,
        shared: SharedFs::Fuse,
        mizzen_toml: Some(toml.to_owned()),
        ..Cluster::spec(&format!("shared-{name}"))
    })
}

/// Runs a shell command as root on the node.
pub fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

/// Every copy has the content that it is named by, is root's, and can be read by nobody else.
#[track_caller]
pub fn assert_sound(cluster: &Cluster, what: &str, copies: usize) {
    let found = on_node(
        cluster,
        &format!(
            "cd {CACHE} && for copy in sha256-*; do [ -e $copy ] || continue; \
             echo $(stat -c '%a %u' $copy) $([ sha256-$(sha256sum < $copy | cut -d' ' -f1) = $copy ] && echo good); done"
        ),
    );
    assert_eq!(found.stdout, "400 0 good\n".repeat(copies), "{what}: {}", found.text());
}

/// Root's processes have ended with the steps.
#[track_caller]
pub fn assert_nobody_left(cluster: &Cluster, what: &str) {
    let script = "for i in $(seq 50); do left=$(pgrep -la 'mizzen-(keeper|store)'); [ -z \"$left\" ] && exit; sleep 0.1; done; echo \"$left\"";
    assert_eq!(on_node(cluster, script).stdout, "", "{what}");
}
