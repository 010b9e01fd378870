//! Images for the tests, made of real programs with the real tools.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use crate::examples::Example;
use crate::release::{Release, lock};
use crate::{run_tool, target_dir};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The directory tree of an image in the making; removed when it is dropped.
pub struct ImageTree {
    directory: PathBuf,
}

impl ImageTree {
    /// An empty tree.
    pub fn empty() -> Result<ImageTree> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = target_dir().join(format!("images/tree.{}.{number}", std::process::id()));
        fs::create_dir_all(&directory)?;
        Ok(ImageTree { directory: directory.canonicalize()? })
    }

    /// Debian's static busybox with its commands, and the directories that an image usually has.
    pub fn busybox() -> Result<ImageTree> {
        let tree = ImageTree::empty()?;
        for directory in ["bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "var"] {
            fs::create_dir(tree.path(directory))?;
        }
        fs::copy("/bin/busybox", tree.path("bin/busybox")).context("busybox-static is not installed")?;
        let applets = run_tool(Command::new("/bin/busybox").arg("--list"))?;
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            symlink("busybox", tree.path("bin").join(applet))?;
        }
        tree.file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")?;
        tree.file("etc/group", "root:x:0:\n")?;
        tree.file("etc/os-release", "PRETTY_NAME=\"Busybox for tests\"\n")?;
        Ok(tree)
    }

    /// A path in the tree.
    pub fn path(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    /// Writes a file, with its directories.
    pub fn file(&self, path: &str, content: &str) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        Ok(fs::write(path, content)?)
    }

    /// Writes a program.
    pub fn program(&self, path: &str, content: &str) -> Result<()> {
        self.file(path, content)?;
        Ok(fs::set_permissions(self.path(path), fs::Permissions::from_mode(0o755))?)
    }

    /// Makes a symbolic link in place of whatever is there.
    pub fn link(&self, path: &str, target: &str) -> Result<()> {
        self.remove(path);
        Ok(symlink(target, self.path(path))?)
    }

    /// Removes a file or an empty directory, if it is there.
    pub fn remove(&self, path: &str) {
        let path = self.path(path);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }

    /// Packs the tree with mksquashfs.
    pub fn squashfs(&self, options: &[&str]) -> Result<Vec<u8>> {
        pack(&self.directory, options)
    }
}

impl Drop for ImageTree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Packs any directory with mksquashfs.
pub fn pack(directory: &Path, options: &[&str]) -> Result<Vec<u8>> {
    let file = target_dir().join(format!(
        "images/packed.{}.{}",
        std::process::id(),
        NUMBER.fetch_add(1, Ordering::Relaxed)
    ));
    fs::create_dir_all(target_dir().join("images"))?;
    run_tool(
        Command::new("mksquashfs").arg(directory).arg(&file).args(["-quiet", "-no-progress"]).args(options),
    )?;
    let image = fs::read(&file)?;
    fs::remove_file(&file)?;
    Ok(image)
}

/// Compiles a C program of `tests/fixtures` that needs no library, and so runs on every machine and in every image.
pub fn c_program(name: &str) -> Result<Vec<u8>> {
    compile(name, &["-static".as_ref()])
}

/// Compiles one that is linked with this library, whose own libraries are not needed for that.
pub fn c_program_with(name: &str, library: &Path) -> Result<Vec<u8>> {
    compile(name, &[library.as_ref(), "-Wl,--unresolved-symbols=ignore-in-shared-libs".as_ref()])
}

/// Compiles a plugin for this release's Slurm.
pub fn spank_plugin(name: &str, release: Release) -> Result<Vec<u8>> {
    let headers = release.rootfs()?.join("usr/include");
    compile(name, &["-shared".as_ref(), "-fPIC".as_ref(), "-I".as_ref(), headers.as_ref()])
}

fn compile(name: &str, options: &[&OsStr]) -> Result<Vec<u8>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/{name}.c"));
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let program = target_dir().join(format!("images/{name}.{}.{number}", std::process::id()));
    fs::create_dir_all(target_dir().join("images"))?;
    let mut gcc = Command::new("gcc");
    run_tool(gcc.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).args(options))?;
    let bytes = fs::read(&program)?;
    fs::remove_file(&program)?;
    Ok(bytes)
}

/// The image of `examples/numpy`: a Debian of the tests' usual release with Open MPI, mpi4py and numpy.
pub fn mpi() -> Result<Vec<u8>> {
    Example::NUMPY.image()
}

/// The tree of that image.
pub fn mpi_rootfs() -> Result<PathBuf> {
    Example::NUMPY.tree()
}

/// Packs a tree of `target/rootfs` as zstd squashfs and keeps it there, without what no program reads, unless that was done before.
pub fn packed_once(root: &Path) -> Result<Vec<u8>> {
    let image = root.with_extension("sqsh");
    let _lock = lock(&root.with_extension("sqsh.lock"))?;
    let made = |file: &Path| fs::metadata(file).and_then(|metadata| metadata.modified());
    // The tree's recipe is written when the tree is whole: an older image is one of another tree.
    if made(&image).is_ok_and(|image| made(&root.with_extension("packages")).is_ok_and(|tree| tree <= image))
    {
        return Ok(fs::read(&image)?);
    }
    let unread = ["usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache", "var/lib/apt"];
    let options = ["-comp", "zstd", "-Xcompression-level", "3", "-no-xattrs", "-e"];
    let bytes = pack(root, &[options.as_slice(), &unread].concat())?;
    let unfinished = root.with_extension("sqsh.new");
    fs::write(&unfinished, &bytes)?;
    fs::rename(&unfinished, &image)?;
    Ok(bytes)
}

/// Wraps a squashfs into a SIF file, byte by byte as the format says.
pub fn sif(squashfs: &[u8]) -> Vec<u8> {
    const TABLE: i64 = 4096;
    const DESCRIPTOR: usize = 585;
    const DATA: i64 = 8192;
    let length = squashfs.len() as i64;
    let mut file = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0002\0".to_vec();
    file.extend([7; 16]); // the uuid
    // Two times; free and all descriptors; place and length of their table; place and length of the data.
    for number in [0, 0, 3, 4, TABLE, 4 * DESCRIPTOR as i64, DATA, length] {
        file.extend(number.to_le_bytes());
    }
    file.resize(TABLE as usize, 0);
    file.extend(0x4004_i32.to_le_bytes()); // a partition
    file.push(1); // in use
    for id in [1_u32, 0xf000_0001, 0] {
        file.extend(id.to_le_bytes());
    }
    for number in [DATA, length, length, 0, 0, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    file.extend([0; 128]); // the name
    file.extend(1_i32.to_le_bytes()); // squashfs
    file.extend(2_i32.to_le_bytes()); // the primary system partition
    file.extend(b"02\0"); // amd64
    file.resize(DATA as usize, 0);
    file.extend_from_slice(squashfs);
    file
}
