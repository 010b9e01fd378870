//! The image's own libraries, as the dynamic linker inside will find them. Read from the image, which is not mounted:
//! its bytes are hostile until shown otherwise.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::{ld_cache, standard_directories};
use crate::elf::Library;
use crate::image::{Entry, Tree, read_file, resolve};

/// The libraries of an image; each is read when it is asked for.
pub struct ImageLibraries<'a> {
    tree: &'a dyn Tree,
    /// The image's own LD_LIBRARY_PATH.
    first: Vec<PathBuf>,
    cache: HashMap<String, Vec<PathBuf>>,
    read: RefCell<HashMap<String, Option<Rc<Library>>>>,
}

/// The C library that an image's programs use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CLibrary {
    /// The one that the node's libraries are made for.
    Glibc,
    /// Another one.
    Musl,
    /// None that we know.
    None,
}

impl<'a> ImageLibraries<'a> {
    /// Looks into an image whose variables are known.
    pub fn of(tree: &'a dyn Tree, environment: &[(OsString, OsString)]) -> ImageLibraries<'a> {
        let path = environment.iter().filter(|(name, _)| name == "LD_LIBRARY_PATH");
        let first = path.flat_map(|(_, value)| std::env::split_paths(value).collect::<Vec<_>>());
        let cached = read_file(tree, Path::new("/etc/ld.so.cache"), ld_cache::LIMIT).ok().flatten();
        let mut cache: HashMap<String, Vec<PathBuf>> = HashMap::new();
        for (name, path) in ld_cache::read(&cached.unwrap_or_default()) {
            cache.entry(name).or_default().push(path);
        }
        let first = first.filter(|directory| directory.is_absolute()).collect();
        ImageLibraries { tree, first, cache, read: RefCell::default() }
    }

    /// An image that has these libraries and no others.
    #[cfg(test)]
    pub fn for_tests(tree: &'a dyn Tree, libraries: &[(&str, &Library)]) -> ImageLibraries<'a> {
        let image = ImageLibraries::of(tree, &[]);
        let known =
            libraries.iter().map(|(name, library)| ((*name).to_owned(), Some(Rc::new((*library).clone()))));
        image.read.borrow_mut().extend(known);
        image
    }

    /// Which C library it has.
    pub fn c_library(&self) -> CLibrary {
        let musl = format!("/lib/ld-musl-{}.so.1", std::env::consts::ARCH);
        if self.find("libc.so.6").is_some() {
            CLibrary::Glibc
        } else if resolve(self.tree, Path::new(&musl)).is_ok_and(|found| found.entry.is_some()) {
            CLibrary::Musl
        } else {
            CLibrary::None
        }
    }

    /// The library that a program inside gets by this name, if it is one for this machine.
    pub fn find(&self, name: &str) -> Option<Rc<Library>> {
        if let Some(known) = self.read.borrow().get(name) {
            return known.clone();
        }
        let found = self.look_for(name).map(Rc::new);
        self.read.borrow_mut().insert(name.to_owned(), found.clone());
        found
    }

    fn look_for(&self, name: &str) -> Option<Library> {
        let first = self.first.iter().map(|directory| directory.join(name));
        let cached = self.cache.get(name).into_iter().flatten().cloned();
        let standard = standard_directories().into_iter().map(|directory| Path::new(&directory).join(name));
        first.chain(cached).chain(standard).find_map(|path| {
            let found = resolve(self.tree, &path).ok()?;
            matches!(found.entry, Some(Entry::File { .. })).then_some(())?;
            Library::read(self.tree.open(&found.path).ok()?.as_ref()).ok().flatten()
        })
    }
}
