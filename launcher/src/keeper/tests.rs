//! What the keeper believes of a file that it is sent.

use super::*;
use rustix::fs::CWD;

const MOUNTS: &str = "36 35 98:0 / / rw - ext4 /dev/sda rw\n\
    40 36 0:51 / /shared rw,nosuid shared:7 master:1 - fuse.bindfs /x rw,user_id=0,group_id=0,allow_other\n\
    41 36 0:52 / /home/u/m rw - fuse.sshfs u@h: rw,user_id=1000,group_id=1000\n\
    42 36 0:53 / /proc rw - proc proc rw\n\
    43 36 0:54 / /odd rw - fuse x rw,xuser_id=0\n";

#[test]
fn files_count_only_on_mounts_of_roots() {
    assert_eq!(check_mount("36", MOUNTS).unwrap(), "ext4 /dev/sda ");
    assert_eq!(check_mount("40", MOUNTS).unwrap(), "fuse.bindfs /x ");
    for (id, why) in [
        ("41", "a user serves"),
        ("43", "a user serves"),
        ("42", "it lies on proc"),
        ("3", "not lie on a mount"),
        ("", "not lie on a mount"),
    ] {
        let refused = check_mount(id, MOUNTS).unwrap_err();
        assert!(refused.contains(why), "{id}: {refused}");
    }
}

#[test]
fn descriptors_that_can_do_more_than_read_are_refused() {
    let file = std::env::temp_dir().join(format!("mizzen-keeper-{}", std::process::id()));
    let writable = File::options().write(true).read(true).create(true).truncate(true).open(&file).unwrap();
    assert!(look_at(&writable.into()).unwrap_err().contains("not open for reading alone"));
    let path_only = openat(CWD, &file, OFlags::PATH, Mode::empty()).unwrap();
    assert!(look_at(&path_only).unwrap_err().contains("not open for reading alone"));
    let found = look_at(&File::open(&file).unwrap().into()).unwrap();
    assert_eq!((found.path.canonicalize().unwrap(), found.links), (file.canonicalize().unwrap(), 1));
    assert!(look_at(&File::open(std::env::temp_dir()).unwrap().into()).unwrap_err().contains("not a file"));
    assert!(look_at(&File::open("/proc/self/status").unwrap().into()).unwrap_err().contains("lies on proc"));
    fs::remove_file(&file).unwrap();
}
