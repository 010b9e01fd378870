//! A kernel of Debian or Ubuntu, and the initial ramdisk that finds the root file system of a virtual machine.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Architecture;
use crate::release::{extract_foreign, extract_ubuntu};
use crate::run_tool;

/// What the root file system is made of, and containers. What these depend on comes before them.
const NEEDED: [&str; 7] = ["virtio_pci", "virtio_mmio", "virtio_blk", "squashfs", "ext4", "overlay", "fuse"];
/// Checksums that ext4 asks for by name, which the ramdisk has nobody to look for.
const BY_NAME: [&str; 3] = ["crc32c_generic", "crc32c_intel", "crc32c-cryptoapi"];

/// A kernel as it is in its package.
pub struct Kernel {
    tree: PathBuf,
    modules: PathBuf,
    /// The version, as in the name of the directory of its modules.
    pub version: String,
}

impl Kernel {
    /// The newest kernel that this Debian release has.
    pub fn of(debian: &str, architecture: Architecture) -> Result<Kernel> {
        let name = format!("kernel-{}", architecture.debian());
        let packages = format!("linux-image-{},busybox-static", architecture.debian());
        Kernel::unpacked(extract_foreign(debian, &name, &packages, architecture.debian())?)
    }

    /// The newest kernel for virtual machines that this Ubuntu release has.
    pub fn of_ubuntu(ubuntu: &str) -> Result<Kernel> {
        Kernel::unpacked(extract_ubuntu(ubuntu, "kernel", "linux-image-virtual,busybox-static")?)
    }

    fn unpacked(tree: PathBuf) -> Result<Kernel> {
        let all = ["usr/lib/modules", "lib/modules"].map(|directory| tree.join(directory));
        let all = all.iter().find(|directory| directory.is_dir()).context("the kernel has no modules")?;
        let modules = fs::read_dir(all)?.next().context("the kernel has no modules")??;
        let version = modules.file_name().to_string_lossy().into_owned();
        Ok(Kernel { modules: modules.path(), tree, version })
    }

    /// The file to boot.
    pub fn image(&self) -> PathBuf {
        let in_boot = self.tree.join(format!("boot/vmlinuz-{}", self.version));
        if in_boot.exists() { in_boot } else { self.modules.join("vmlinuz") }
    }

    /// A static busybox for the same machine.
    pub fn busybox(&self) -> Result<PathBuf> {
        let places = ["usr/bin/busybox", "bin/busybox"].map(|place| self.tree.join(place));
        places.into_iter().find(|place| place.exists()).context("no busybox in the package")
    }

    /// Makes the ramdisk.
    pub fn write_ramdisk(&self, file: &Path) -> Result<()> {
        let root = file.with_extension("tree");
        let _ = fs::remove_dir_all(&root);
        for directory in ["bin", "modules"] {
            fs::create_dir_all(root.join(directory))?;
        }
        fs::copy(self.busybox()?, root.join("bin/busybox"))?;
        fs::write(root.join("init"), include_str!("init.sh"))?;
        fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
        let mut order = Order { all: self.module_files()?, loaded: Vec::new(), root: root.clone() };
        for name in BY_NAME.iter().chain(&NEEDED) {
            order.load(name)?;
        }
        fs::write(root.join("modules/order"), order.loaded.join("\n"))?;
        let script = "cd \"$0\" && find . | /bin/busybox cpio -o -H newc | gzip -1 > \"$1\"";
        run_tool(Command::new("sh").args(["-ec", script]).arg(&root).arg(file))?;
        Ok(fs::remove_dir_all(&root)?)
    }

    /// All modules by name; what is in the kernel itself has no file.
    fn module_files(&self) -> Result<BTreeMap<String, PathBuf>> {
        let listing = run_tool(Command::new("find").arg(&self.modules).args(["-name", "*.ko*"]))?;
        let by_name = |line: &str| {
            let name = Path::new(line).file_name()?.to_str()?.split(".ko").next()?;
            Some((same_name(name), PathBuf::from(line)))
        };
        Ok(listing.lines().filter_map(by_name).collect())
    }
}

/// Modules in the order in which they can be loaded.
struct Order {
    all: BTreeMap<String, PathBuf>,
    loaded: Vec<String>,
    root: PathBuf,
}

impl Order {
    fn load(&mut self, name: &str) -> Result<()> {
        let name = same_name(name);
        let file_name = format!("{name}.ko");
        let Some(file) = self.all.get(&name).filter(|_| !self.loaded.contains(&file_name)) else {
            return Ok(());
        };
        let module = unpack(file)?;
        for other in dependencies(&module) {
            self.load(&other)?;
        }
        fs::write(self.root.join("modules").join(&file_name), module)?;
        self.loaded.push(file_name);
        Ok(())
    }
}

/// Files have dashes where the kernel has underscores.
fn same_name(name: &str) -> String {
    name.replace('-', "_")
}

fn unpack(file: &Path) -> Result<Vec<u8>> {
    let tool = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(fs::read(file)?),
    };
    let unpacked = Command::new(tool).arg("-dc").arg(file).output().context(tool)?;
    Ok(unpacked.stdout)
}

/// What a module says that it needs: `depends=a,b` in its section of information, whose entries end with a zero.
fn dependencies(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(start) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = module[start + key.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_module_names_what_it_needs() {
        let needs = |module: &[u8]| super::dependencies(module);
        assert_eq!(needs(b"\x7fELF\0license=GPL\0depends=jbd2,mbcache\0name=ext4\0"), ["jbd2", "mbcache"]);
        assert!(needs(b"\x7fELF\0depends=\0name=overlay\0").is_empty());
        assert!(needs(b"\x7fELF\0name=x\0").is_empty());
    }
}
