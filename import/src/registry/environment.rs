//! The variables that say where credentials, certificates and proxies are.
//!
//! They are asked for through this type, so that a test can give others: all tests share one process.
//!
//! Run by: the user, in the importer.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

type Lookup = dyn Fn(&str) -> Option<OsString> + Send + Sync;

/// Variables by name.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

impl Environment {
    /// This process's.
    pub fn of_process() -> Environment {
        Environment(Arc::new(|name| std::env::var_os(name)))
    }

    /// Exactly these.
    pub fn of<N: Into<String>, V: Into<OsString>>(
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Environment {
        let variables: HashMap<String, OsString> =
            variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Environment(Arc::new(move |name| variables.get(name).cloned()))
    }

    /// A text, if there is one and it is not empty.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.0)(name)?.into_string().ok().filter(|text| !text.is_empty())
    }

    /// The first of several that says something.
    pub fn first_text(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|name| Some((*name, self.text(name)?)))
    }

    /// A path, if there is one and it is not empty.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        (self.0)(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// The user's own directory.
    pub fn home(&self) -> Option<PathBuf> {
        self.path("HOME").filter(|path| path.is_absolute())
    }

    /// Where the user's settings are.
    pub fn config_home(&self) -> Option<PathBuf> {
        let told = self.path("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
        told.or_else(|| Some(self.home()?.join(".config")))
    }
}

impl fmt::Debug for Environment {
    /// Variables may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Environment")
    }
}
