//! The AppArmor profile: that AppArmor's own parser takes it. `make test-kernels` shows that it grants user namespaces, on Ubuntu's kernel.

use mizzen_tests::Release;
use mizzen_tests::check::assert_out;
use mizzen_tests::release::{packages_rootfs, ubuntu_rootfs};

use crate::site::{Site, Tool, Version};

const PROFILE: &str = "/etc/apparmor.d/mizzen";

fn start(name: &str, release: Release, rootfs: std::path::PathBuf) -> Site {
    Site::start(Tool::Apt, Site::spec(name, release, Some(rootfs)))
}

#[test]
fn ubuntus_apparmor_takes_the_profile() {
    let site = start("apparmor-noble", Release::Slurm22_05, ubuntu_rootfs("noble").unwrap());
    site.install("ctl", Version::This);
    assert_out(&site.root("ctl", &format!("apparmor_parser --names {PROFILE}")), 0, "mizzen\n");
    // Compiled, but not given to the kernel: the profile, and the directory as AppArmor's service reads it.
    for what in [PROFILE, "/etc/apparmor.d"] {
        let parsed = site.root("ctl", &format!("apparmor_parser --skip-kernel-load --skip-cache {what}"));
        assert!(!parsed.stderr.contains("error"), "{}", parsed.text());
    }
    // Who does not want it says so as for every profile, or with a file of their own.
    site.root("ctl", &format!("rm {PROFILE}; echo '# mine' > {PROFILE}"));
    site.install("ctl", Version::Next);
    site.remove("ctl");
    assert_out(&site.root("ctl", &format!("cat {PROFILE}")), 0, "# mine\n");
}

/// An older one cannot read it, and would fail at its next start. When a newer one comes, the profile is put there.
#[test]
fn older_apparmors_do_not_see_the_profile() {
    let site = start("apparmor-bookworm", Release::Slurm22_05, packages_rootfs().unwrap());
    site.install("ctl", Version::This);
    site.root("ctl", &format!("! test -e {PROFILE}"));
    let newer = "mkdir -p new/DEBIAN new/etc/apparmor.d/abi; touch new/etc/apparmor.d/abi/4.0; \
                 printf 'Package: newer\\nVersion: 1\\nArchitecture: all\\nMaintainer: x <x@y>\\nDescription: x\\n' > new/DEBIAN/control; \
                 dpkg-deb --build new >/dev/null; dpkg -i new.deb";
    site.root("ctl", newer);
    let link = format!("readlink {PROFILE}");
    assert_out(&site.root("ctl", &link), 0, "/usr/share/mizzen/apparmor/mizzen\n");
    site.remove("ctl");
    site.root("ctl", &format!("! test -L {PROFILE}"));
}
