//! Whether a file lies on a network file system. Runs as the user on the host.

use std::os::fd::AsFd;

use mizzen_core::mountinfo;
use rustix::fs::{fstat, fstatfs, major, minor};

use crate::trace::OrDebug;

/// What statfs says of file systems that many nodes share.
const NETWORK_MAGIC: [u32; 21] = [
    0x6969,      // NFS
    0x0bd0_0bd0, // Lustre
    0x4750_4653, // GPFS, Storage Scale
    0x1983_0326, // BeeGFS
    0x00c3_6400, // Ceph
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB 2
    0x517b,      // SMB
    0x5346_414f, // OpenAFS
    0x6b41_4653, // AFS of the kernel
    0x7375_7245, // Coda
    0x564c,      // NCP
    0x0102_1997, // 9P
    0x2003_0528, // OrangeFS
    0xaad7_aaea, // PanFS
    0x7461_636f, // OCFS2
    0x0116_1970, // GFS2
    0xbeef_dead, // StorNext
    0x0131_11a8, // IBRIX
    0x6163_6673, // ACFS
    0xa501_fcf5, // VxFS, which clusters share
];
const FUSE_MAGIC: u32 = 0x6573_5546;
/// tmpfs and ramfs.
const MEMORY_MAGIC: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// Types in mountinfo of those that have no number of their own. Not all of FUSE: much that it serves is local.
const NETWORK_TYPES: [&str; 17] = [
    "wekafs",
    "fuse.beegfs",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.daos",
    "fuse.dfuse",
    "fuse.gcsfuse",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.lizardfs",
    "fuse.mfs",
    "fuse.mount-s3",
    "fuse.quobyte",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.seaweedfs",
    "fuse.sshfs",
];

/// Whether the open file lies on a network file system, or on one that the site calls so.
pub fn is_network(file: impl AsFd, site: &[String]) -> bool {
    let magic = magic(&file);
    if magic.is_some_and(|magic| NETWORK_MAGIC.contains(&magic)) {
        return true;
    }
    if magic != Some(FUSE_MAGIC) && site.is_empty() && magic.is_some() {
        return false;
    }
    type_of(&file).is_some_and(|name| {
        NETWORK_TYPES.contains(&name.as_str()) || site.iter().any(|listed| matches(listed, &name))
    })
}

/// Whether what is written there takes the node's memory.
pub fn is_memory(file: impl AsFd) -> bool {
    magic(file).is_some_and(|magic| MEMORY_MAGIC.contains(&magic))
}

/// Whether it lies on a disk of this node. Other file systems have a number without a driver.
pub fn is_disk(file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| major(stat.st_dev) != 0)
}

/// Whether a process serves it.
pub fn is_fuse(file: impl AsFd) -> bool {
    magic(file) == Some(FUSE_MAGIC)
}

fn magic(file: impl AsFd) -> Option<u32> {
    // The kernel's numbers have 32 bits; the field's type differs between machines.
    fstatfs(file).ok().map(|found| found.f_type as u32)
}

/// A listed type stands for its subtypes as well: fuse for fuse.sshfs.
fn matches(listed: &str, name: &str) -> bool {
    name.strip_prefix(listed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The type of the file system as mountinfo names it.
fn type_of(file: impl AsFd) -> Option<String> {
    let device = fstat(file).ok()?.st_dev;
    let device = format!("{}:{}", major(device), minor(device));
    mountinfo::read()
        .or_debug("the type of a file system is unknown")?
        .into_iter()
        .find(|line| line.device == device)
        .map(|line| line.fs_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_type_has_subtypes() {
        assert!(matches("fuse", "fuse.bindfs") && matches("fuse", "fuse") && matches("ext4", "ext4"));
        assert!(!matches("fuse", "fuseblk") && !matches("fuse.bindfs", "fuse"));
    }

    #[test]
    fn the_sites_list_counts() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(!is_network(&file, &[]));
        assert!(is_network(&file, &["nothing".to_owned(), "proc".to_owned()]));
    }
}
