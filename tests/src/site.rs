//! What the tests of site copies start from and assert.

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
        ..Cluster::spec(&format!("site-{name}"))
    })
}

/// Runs a shell command as root on the node.
pub fn on_node(cluster: &Cluster, script: &str) -> Output {
    cluster.run_on("node1", User::Root, script)
}

/// Every copy has the content that it is named by, is root's, and nobody can write to it.
#[track_caller]
pub fn assert_sound(cluster: &Cluster, what: &str, copies: usize) {
    let found = on_node(
        cluster,
        &format!(
            "cd {CACHE} && for copy in sha256-*; do [ -e $copy ] || continue; \
             echo $(stat -c '%a %u' $copy) $([ sha256-$(sha256sum < $copy | cut -d' ' -f1) = $copy ] && echo good); done"
        ),
    );
    assert_eq!(found.stdout, "444 0 good\n".repeat(copies), "{what}: {}", found.text());
}

/// How many copies users have made for themselves on the node; they are removed.
pub fn own_copies(cluster: &Cluster) -> usize {
    let found = on_node(cluster, "ls -d /var/tmp/mizzen-*/sha256-* 2>/dev/null; rm -rf /var/tmp/mizzen-*");
    found.stdout.lines().count()
}
