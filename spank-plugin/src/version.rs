//! One binary for every Slurm release: at load time the plugin takes on the version of the Slurm it is in.
//!
//! Slurm refuses a plugin whose word `plugin_version` names another major.minor than its own, although the
//! SPANK ABI has not changed since 20.11. So the word is filled in by an ELF constructor, which runs before
//! Slurm looks at it. The truth comes from another plugin of this Slurm: one that is loaded already, or (in
//! sbatch and salloc, which load none that early) a plugin file beside libslurmfull.so. That file is read, not
//! loaded: its constructors are not ours to run.
//!
//! Runs as the user in the clients, as root in slurmd and slurmstepd. The only paths touched are those of
//! libraries that the process itself has loaded, and their directory.
#![allow(unsafe_code)] // dl_iterate_phdr and dlsym

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;
use mizzen_core::build;
use object::{Object, ObjectSection, ObjectSymbol};

/// For `mizzen doctor`, which reads it in the plugin's file.
#[used]
static BUILD: [u8; build::MARKED.len()] = build::MARKED;

/// Slurm's own library.
const LIBRARY: &str = "libslurmfull.so";

/// The version of the Slurm in this process, `(major << 16) | (minor << 8) | micro`.
pub fn find_slurm_version() -> Option<u32> {
    let mut libraries = loaded_libraries();
    // Most often its plugins lie beside Slurm's own library: those first.
    let slurms = libraries
        .iter()
        .find(|path| path.ends_with(LIBRARY))
        .and_then(|path| Some(path.parent()?.to_owned()));
    libraries.sort_by_key(|path| path.ends_with(LIBRARY) || path.parent() != slurms.as_deref());
    version_of_loaded_plugin(&libraries).or_else(|| version_of_plugin_file(&libraries))
}

/// The paths of all libraries in this process, in the order in which they were loaded.
pub fn loaded_libraries() -> Vec<PathBuf> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, list: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid `info`, and back the pointer to `list` that it was given.
        let (info, list) = unsafe { (&*info, &mut *list.cast::<Vec<PathBuf>>()) };
        if !info.dlpi_name.is_null() {
            // SAFETY: the linker's name of a loaded object is a C string that lives while we are called.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            list.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        }
        0
    }
    let mut list: Vec<PathBuf> = Vec::new();
    // SAFETY: `collect` gets this pointer back as its third argument and uses it only during the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut list).cast()) };
    list.retain(|path| path.is_absolute()); // the program itself and the vdso have no path
    list
}

fn version_of_loaded_plugin(libraries: &[PathBuf]) -> Option<u32> {
    for path in libraries {
        // SAFETY: with RTLD_NOLOAD nothing new is loaded and no constructor runs.
        let Ok(library) = (unsafe { Library::open(Some(path), libc::RTLD_NOLOAD | libc::RTLD_LAZY) }) else {
            continue;
        };
        // SAFETY: in an object of Slurm `plugin_type` is a C string; others do not define the name. The lookup
        // may end in a dependency of the object, which is as good.
        let kind = unsafe { library.get::<*const c_char>(b"plugin_type\0") };
        // SAFETY: likewise an unsigned int.
        let version = unsafe { library.get::<*const u32>(b"plugin_version\0") };
        let (Ok(kind), Ok(version)) = (kind, version) else { continue };
        // SAFETY: the symbol's address is that of the string (`as_raw_ptr` of a data symbol).
        let kind = unsafe { CStr::from_ptr(kind.as_raw_ptr().cast()) };
        // SAFETY: and that of the word, which no thread writes once its library is loaded.
        let version = unsafe { version.as_raw_ptr().cast::<u32>().read() };
        if is_slurm_version(kind.to_bytes(), version) {
            return Some(version);
        }
    }
    None
}

fn version_of_plugin_file(libraries: &[PathBuf]) -> Option<u32> {
    let directory = libraries.iter().find(|path| path.ends_with(LIBRARY))?.parent()?;
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory).ok()?.flatten().map(|e| e.path()).collect();
    files.sort();
    files.iter().filter(|path| path.extension() == Some(OsStr::new("so"))).find_map(|path| read_version(path))
}

/// Reads the two data symbols of a plugin file.
fn read_version(path: &Path) -> Option<u32> {
    let bytes = std::fs::read(path).ok()?;
    let elf = object::File::parse(bytes.as_slice()).ok()?;
    let data = |name: &str| -> Option<&[u8]> {
        let symbol = elf.dynamic_symbols().find(|symbol| symbol.name() == Ok(name))?;
        let section = elf.section_by_index(symbol.section_index()?).ok()?;
        let offset = usize::try_from(symbol.address().checked_sub(section.address())?).ok()?;
        let length = usize::try_from(symbol.size()).ok()?;
        section.data().ok()?.get(offset..offset.checked_add(length)?)
    };
    let version = u32::from_ne_bytes(data("plugin_version")?.try_into().ok()?);
    let kind = data("plugin_type")?;
    is_slurm_version(kind, version).then_some(version)
}

/// Other SPANK plugins do not count: they may be left over from another release, or do what we do.
fn is_slurm_version(plugin_type: &[u8], version: u32) -> bool {
    let major = version >> 16;
    !plugin_type.starts_with(b"spank") && (20..100).contains(&major)
}
