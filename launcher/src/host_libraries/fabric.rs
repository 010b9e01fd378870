//! Libraries for the node's fabric: the image's, if it has any for the node's adapters, else the node's.

use std::path::Path;

use mizzen_core::settings::Fabric;
use nix::sys::resource::{Resource, getrlimit};

use super::discover::Node;
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
