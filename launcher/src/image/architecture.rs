//! Which machine a program was made for, and which one this is. Runs as the user on the host.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::tree::{self, Entry, Tree};

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
    /// 32-bit x86, any generation.
    I686,
    /// 64-bit ARM.
    Aarch64,
    /// 32-bit ARM.
    Arm,
    /// 64-bit POWER, little-endian.
    Ppc64le,
    /// 64-bit POWER, big-endian.
    Ppc64,
    /// 64-bit RISC-V.
    Riscv64,
    /// IBM Z.
    S390x,
    /// 64-bit LoongArch.
    Loongarch64,
    /// 64-bit MIPS, either byte order.
    Mips64,
    /// 32-bit MIPS, either byte order.
    Mips,
}

use Architecture::*;

/// One row per machine: its name in `uname -m`, in OCI and SIF documents (Go's name), and SIF's own number.
const TABLE: &[(Architecture, &str, &str, &str)] = &[
    (X86_64, "x86_64", "amd64", "02"),
    (I686, "i686", "386", "01"),
    (Aarch64, "aarch64", "arm64", "04"),
    (Arm, "armv7l", "arm", "03"),
    (Ppc64le, "ppc64le", "ppc64le", "06"),
    (Ppc64, "ppc64", "ppc64", "05"),
    (Riscv64, "riscv64", "riscv64", "12"),
    (S390x, "s390x", "s390x", "11"),
    (Loongarch64, "loongarch64", "loong64", ""),
    (Mips64, "mips64", "mips64", "09"),
    (Mips64, "mips64", "mips64le", "10"),
    (Mips, "mips", "mips", "07"),
    (Mips, "mips", "mipsle", "08"),
];

impl Architecture {
    /// The name that `uname -m` prints on such a machine.
    pub fn name(self) -> &'static str {
        TABLE.iter().find(|row| row.0 == self).map_or("unknown", |row| row.1)
    }

    /// Its name in OCI documents.
    pub fn oci_name(self) -> &'static str {
        TABLE.iter().find(|row| row.0 == self).map_or("unknown", |row| row.2)
    }

    /// From the `architecture` of an OCI configuration or Charliecloud's `arch`, where a variant may follow
    /// (`arm64/v8`).
    pub fn from_oci(name: &str) -> Option<Architecture> {
        let name = name.split('/').next().unwrap_or_default();
        TABLE.iter().find(|row| row.2 == name || row.1 == name).map(|row| row.0)
    }

    /// From the two digits in a SIF file.
    pub fn from_sif(digits: &str) -> Option<Architecture> {
        TABLE.iter().find(|row| !digits.is_empty() && row.3 == digits).map(|row| row.0)
    }

    /// From what `uname -m` prints.
    pub fn from_uname(name: &str) -> Option<Architecture> {
        match name {
            "i386" | "i486" | "i586" | "i686" => Some(I686),
            _ if name.starts_with("armv") => Some(Arm),
            _ => TABLE.iter().find(|row| row.1 == name).map(|row| row.0),
        }
    }

    /// From the first bytes of a program; none if they are no ELF header of a machine we know.
    pub fn from_elf(head: &[u8]) -> Option<Architecture> {
        if !head.starts_with(b"\x7fELF") {
            return None;
        }
        let (wide, little) = (*head.get(4)? == 2, *head.get(5)? == 1);
        let pair = [*head.get(18)?, *head.get(19)?];
        let machine = if little { u16::from_le_bytes(pair) } else { u16::from_be_bytes(pair) };
        match (machine, wide, little) {
            (3, false, true) => Some(I686),
            (8, false, _) => Some(Mips),
            (8, true, _) => Some(Mips64),
            (21, true, true) => Some(Ppc64le),
            (21, true, false) => Some(Ppc64),
            (22, true, false) => Some(S390x),
            (40, false, true) => Some(Arm),
            // With 32-bit addresses this is x32, which also needs an x86_64 kernel.
            (62, _, true) => Some(X86_64),
            (183, true, true) => Some(Aarch64),
            (243, true, true) => Some(Riscv64),
            (258, true, true) => Some(Loongarch64),
            _ => None,
        }
    }

    /// Whether a node of this architecture can run programs made for `program`. Most 64-bit ARM processors of
    /// today cannot run 32-bit programs, but some can and uname does not tell: the kernel decides at exec.
    pub fn runs(self, program: Architecture) -> bool {
        self == program || matches!((self, program), (X86_64, I686) | (Aarch64, Arm))
    }
}

/// The node's machine, as its kernel says; none if we have no name for it.
pub fn host_architecture() -> Option<Architecture> {
    Architecture::from_uname(&rustix::system::uname().machine().to_string_lossy())
}

/// Programs that say what the image is made for, the most telling first.
const PROGRAMS: &[&str] = &["/bin/sh", "/usr/bin/env"];
/// Directories and how the dynamic loader's name starts there: an image without a shell still has one.
const LOADERS: &[(&str, &str)] =
    &[("/lib", "ld-linux"), ("/lib64", "ld-"), ("/lib", "ld-musl"), ("/usr/lib64", "ld-")];
/// Programs to try when there is no loader either.
const STATIC: &[&str] = &["/sbin/init", "/bin/busybox"];
/// Where any program will do.
const DIRECTORIES: &[&str] = &["/", "/bin", "/usr/bin", "/usr/local/bin", "/app"];
/// How many files of such a directory are opened: each may be a script.
const SCAN_LIMIT: usize = 64;

/// What the programs in an image are made for. Nothing depends on finding it, so what cannot be read is
/// passed over; the mount or the exec reports real damage.
pub(super) fn of_image(tree: &dyn Tree) -> Option<Architecture> {
    PROGRAMS
        .iter()
        .find_map(|path| of_program(tree, Path::new(path)))
        .or_else(|| LOADERS.iter().find_map(|(directory, start)| of_directory(tree, directory, start)))
        .or_else(|| STATIC.iter().find_map(|path| of_program(tree, Path::new(path))))
        .or_else(|| DIRECTORIES.iter().find_map(|directory| of_directory(tree, directory, "")))
}

fn of_directory(tree: &dyn Tree, directory: &str, start: &str) -> Option<Architecture> {
    let directory = tree::resolve(tree, Path::new(directory)).ok()?;
    if directory.entry != Some(Entry::Directory) {
        return None;
    }
    let mut names = tree.list(&directory.path).ok()?;
    names.sort_by(|a, b| a.0.cmp(&b.0));
    let programs = names.into_iter().filter(|(name, entry)| {
        let right_kind = matches!(entry, Entry::File { executable: true } | Entry::Symlink);
        right_kind && name.as_bytes().starts_with(OsStr::new(start).as_bytes())
    });
    let paths: Vec<PathBuf> = programs.take(SCAN_LIMIT).map(|(name, _)| directory.path.join(name)).collect();
    paths.iter().find_map(|path| of_program(tree, path))
}

fn of_program(tree: &dyn Tree, path: &Path) -> Option<Architecture> {
    let found = tree::resolve(tree, path).ok()?;
    if !matches!(found.entry, Some(Entry::File { .. })) {
        return None;
    }
    Architecture::from_elf(&tree.read(&found.path, 20).ok()?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::Scratch;
    use super::super::tree::DirectoryTree;
    use super::*;

    /// The first 20 bytes of a program.
    pub fn elf(class: u8, data: u8, machine: u16) -> Vec<u8> {
        let mut head = b"\x7fELF\0\0\x01\0\0\0\0\0\0\0\0\0\x02\0\0\0".to_vec();
        (head[4], head[5]) = (class, data);
        let machine = if data == 1 { machine.to_le_bytes() } else { machine.to_be_bytes() };
        head[18..20].copy_from_slice(&machine);
        head
    }

    fn of(scratch: &Scratch) -> Option<Architecture> {
        of_image(&DirectoryTree::open(scratch.path()).unwrap())
    }

    #[test]
    fn elf_headers_name_their_machine() {
        assert_eq!(Architecture::from_elf(&elf(2, 1, 62)), Some(X86_64));
        assert_eq!(Architecture::from_elf(&elf(1, 1, 3)), Some(I686));
        assert_eq!(Architecture::from_elf(&elf(2, 1, 183)), Some(Aarch64));
        assert_eq!(Architecture::from_elf(&elf(2, 1, 21)), Some(Ppc64le));
        assert_eq!(Architecture::from_elf(&elf(2, 2, 21)), Some(Ppc64));
        assert_eq!(Architecture::from_elf(&elf(2, 2, 22)), Some(S390x));
        assert_eq!(Architecture::from_elf(&elf(2, 1, 243)), Some(Riscv64));
        assert_eq!(Architecture::from_elf(&elf(2, 1, 9999)), None);
        for cut in 0..20 {
            assert_eq!(Architecture::from_elf(&elf(2, 1, 62)[..cut]), None, "{cut} bytes are no header");
        }
    }

    #[test]
    fn names_of_every_convention() {
        assert_eq!(Architecture::from_oci("amd64"), Some(X86_64));
        assert_eq!(Architecture::from_oci("arm64/v8"), Some(Aarch64));
        assert_eq!(Architecture::from_oci("sparc"), None);
        assert_eq!(Architecture::from_sif("04"), Some(Aarch64));
        assert_eq!(Architecture::from_sif(""), None);
        assert_eq!(Architecture::from_uname("i586"), Some(I686));
        assert_eq!(Architecture::from_uname("armv6l"), Some(Arm));
        assert_eq!(Aarch64.name(), "aarch64");
        assert_eq!(I686.name(), "i686");
    }

    #[test]
    fn this_machine_runs_its_own_programs() {
        let host = host_architecture().unwrap();
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert_eq!(Architecture::from_elf(&own), Some(host));
        assert!(host.runs(host) && X86_64.runs(I686) && !I686.runs(X86_64) && !X86_64.runs(Aarch64));
    }

    #[test]
    fn an_image_is_known_by_its_shell_loader_or_any_program() {
        let image = Scratch::new();
        assert_eq!(of(&image), None);
        image.executable("bin/script", "#!/bin/sh\n");
        image.executable("bin/tool", elf(2, 2, 22));
        assert_eq!(of(&image), Some(S390x), "any program in /bin");
        image.executable("lib64/ld-linux-x86-64.so.2", elf(2, 1, 62));
        assert_eq!(of(&image), Some(X86_64), "the loader wins over a stray program");
        image.executable("usr/bin/dash", elf(2, 1, 183));
        image.link("bin/sh", "/usr/bin/dash");
        assert_eq!(of(&image), Some(Aarch64), "the shell wins, through an absolute link");
    }

    #[test]
    fn a_distroless_image_with_one_program() {
        let image = Scratch::new();
        image.executable("server", elf(2, 1, 183));
        assert_eq!(of(&image), Some(Aarch64));
    }
}
