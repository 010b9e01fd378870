//! Libraries for the node's fabric: the image's, if it has any for the node's adapters, else the node's.

use std::path::Path;

use mizzen_core::settings::Fabric;
use nix::sys::resource::{Resource, getrlimit};

use super::discover::Node;
use super::image_libraries::ImageLibraries;
use super::pattern::matches;
use super::rules::Rule;
use super::standard_directories;
use crate::image::{Tree, resolve};

/// RDMA locks its buffers in memory. With less than this nothing but a demonstration works.
const LOCKED_MEMORY: u64 = 64 << 20;

/// Why the image's own libraries are left in use; none if the node's are wanted.
pub fn images_own(setting: Fabric, rule: &Rule, node: &Node, tree: &dyn Tree) -> Option<String> {
    match setting {
        Fabric::Host => return None,
        Fabric::Image => return Some("fabric=image".to_owned()),
        Fabric::Auto if rule.providers.is_empty() => return None,
        Fabric::Auto => {}
    }
    let mut wanted: Vec<String> = node.adapter_drivers();
    wanted.sort();
    wanted.dedup();
    wanted.retain(|driver| rule.providers.contains_key(driver));
    let has = |provider: &str| {
        standard_directories().iter().any(|directory| has_library(tree, directory, provider))
    };
    let serves = match wanted.is_empty() {
        // No adapter that we know.
        true => rule.providers.values().any(|provider| has(provider)),
        false => wanted.iter().all(|driver| rule.providers.get(driver).is_some_and(|provider| has(provider))),
    };
    serves.then(|| {
        format!(
            "fabric=auto, and the image has its own for {}",
            match wanted.is_empty() {
                true => "some adapters".to_owned(),
                false => wanted.join(", "),
            }
        )
    })
}

/// Providers of libibverbs lie in a directory of their own; long ago they lay beside it.
fn has_library(tree: &dyn Tree, directory: &str, wanted: &str) -> bool {
    [Path::new(directory).join("libibverbs"), directory.into()].iter().any(|directory| {
        let Ok(found) = resolve(tree, directory) else { return false };
        let names = tree.list(&found.path).unwrap_or_default();
        names.iter().any(|(name, _)| name.to_str().is_some_and(|name| matches(wanted, name)))
    })
}

/// Whether the site or the image shows that somebody wants to use the fabric: the image has the library itself.
pub fn is_used(setting: Fabric, rule: &Rule, image: &ImageLibraries) -> bool {
    let mut libraries = rule.sets.iter().flat_map(|set| &set.libraries);
    setting == Fabric::Host || libraries.any(|library| image.find(library).is_some())
}

/// What to do if programs cannot lock memory for the adapter.
pub fn locked_memory() -> Option<String> {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK).ok()?;
    (limit < LOCKED_MEMORY).then(|| {
        format!(
            "programs may lock {} KiB of memory only (ulimit -l), too little for RDMA; slurmd needs \
             LimitMEMLOCK=infinity, and slurm.conf PropagateResourceLimitsExcept=MEMLOCK",
            limit >> 10
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::DirectoryTree;
    use crate::image::testing::Scratch;

    #[test]
    fn the_images_own_serve_if_they_know_every_adapter() {
        let rule: Rule = toml::from_str(
            "switch = \"fabric\"\nwhen = [\"/dev/infiniband\"]\n[providers]\n\
             mlx5_core = \"libmlx5-rdmav*.so\"\nhfi1 = \"libhfi1verbs-rdmav*.so\"\n",
        )
        .unwrap();
        let own = |adapters: &[(&str, &str)], libraries: &[&str], setting| {
            let (node, image) = (Scratch::new(), Scratch::new());
            for (adapter, driver) in adapters {
                let device = format!("sys/class/infiniband/{adapter}/device");
                node.directory(&device);
                node.link(&format!("{device}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
            }
            libraries.iter().for_each(|library| drop(image.file(library, "")));
            let tree = DirectoryTree::open(image.path()).unwrap();
            images_own(setting, &rule, &Node::at(node.path()), &tree)
        };
        let (mlx5, unknown) = (("mlx5_0", "mlx5_core"), ("x_0", "x"));
        let library = "usr/lib64/libibverbs/libmlx5-rdmav34.so";
        assert_eq!(
            own(&[mlx5, unknown], &[library], Fabric::Auto).as_deref(),
            Some("fabric=auto, and the image has its own for mlx5_core")
        );
        assert_eq!(own(&[mlx5], &["usr/lib64/libibverbs/libmlx4-rdmav34.so"], Fabric::Auto), None);
        assert_eq!(own(&[mlx5, ("hfi1_0", "hfi1")], &[library], Fabric::Auto), None);
        assert!(
            own(&[unknown], &[library], Fabric::Auto).is_some(),
            "as good as the node's, for all we know"
        );
        assert_eq!(own(&[], &[], Fabric::Auto), None);
        assert_eq!(own(&[mlx5], &[library], Fabric::Host), None);
        assert!(own(&[mlx5], &[], Fabric::Image).is_some());
    }
}
