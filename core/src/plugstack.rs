//! plugstack.conf, found and read as Slurm does: which line loads the plugin, and with which words behind it. The plugin itself gets
//! these from Slurm; this is for the launcher that is started by hand, and for `mizzen doctor`. It runs as who calls them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::trusted_file::check_only_roots;
use crate::{SlurmConf, pattern};

/// The plugin's file, whatever its directory.
pub const PLUGIN: &str = "spank_mizzen.so";
/// Files that include each other end somewhere.
const INCLUDE_DEPTH: usize = 8;

/// The line of plugstack.conf that loads the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `required` or `optional`.
    pub word: String,
    /// The plugin.
    pub plugin: PathBuf,
    /// The words behind it.
    pub arguments: Vec<String>,
    /// The file in which the line is.
    pub file: PathBuf,
    /// Its number there.
    pub number: usize,
}

/// The directory of this machine's slurm.conf. SLURM_CONF is the user's to set; it counts if it names a slurm.conf that nobody but root
/// can have written, and not any other file of root's: beside that there would be no plugstack.conf, and so no settings of the site's.
pub fn slurm_directory() -> Option<PathBuf> {
    let named = std::env::var_os("SLURM_CONF").map(PathBuf::from);
    let named = named.filter(|file| {
        let is_conf = file.file_name().is_some_and(|name| name == "slurm.conf");
        is_conf && file.is_absolute() && check_only_roots(file).is_ok()
    });
    SlurmConf::find_directory(named.as_deref())
}

/// The plugstack.conf of the Slurm whose slurm.conf is in this directory.
pub fn path(slurm_directory: &Path) -> PathBuf {
    let conf = SlurmConf::read_file(&slurm_directory.join("slurm.conf"));
    let named = conf.as_ref().and_then(|conf| conf.value("PlugStackConfig"));
    slurm_directory.join(named.unwrap_or("plugstack.conf"))
}

/// This machine's plugstack.conf. Without a slurm.conf there is none: Slurm's commands then fetch both from slurmctld, and a
/// plugstack.conf that lies here means nothing to them.
pub fn path_of_this_machine() -> Option<PathBuf> {
    slurm_directory().map(|directory| path(&directory))
}

/// The line that loads the plugin on this machine, if there is one.
pub fn find() -> Option<Line> {
    find_in(&path_of_this_machine()?)
}

/// The same, in this file and those that it includes.
pub fn find_in(file: &Path) -> Option<Line> {
    find_line(file, INCLUDE_DEPTH)
}

fn find_line(file: &Path, depth: usize) -> Option<Line> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().zip(1..).find_map(|(line, number)| {
        let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
        let (word, path) = (words.next()?, Path::new(words.next()?));
        let path = file.parent().unwrap_or(Path::new("/")).join(path);
        if word == "include" {
            let included = || included_files(&path).into_iter().find_map(|file| find_line(&file, depth - 1));
            return (depth > 0).then(included).flatten();
        }
        let ours = path.file_name().is_some_and(|name| name == PLUGIN || name == "libspank_mizzen.so");
        (ours && ["required", "optional"].contains(&word)).then(|| Line {
            word: word.to_owned(),
            plugin: path,
            arguments: words.map(str::to_owned).collect(),
            file: file.to_owned(),
            number,
        })
    })
}

/// The files that an include names; its last part may be a pattern.
fn included_files(path: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return Vec::new();
    };
    let is_named =
        |own: &str| (name.starts_with('.') || !own.starts_with('.')) && pattern::matches(name, own);
    let entries = fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let named = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_named));
    let mut files: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_where_slurm_finds_it() {
        let top = std::env::temp_dir().join(format!("mizzen-plugstack-{}", std::process::id()));
        let write = |name: &str, text: &str| fs::write(top.join(name), text).unwrap();
        fs::create_dir_all(top.join("d")).unwrap();
        write("slurm.conf", "ClusterName=x\nInclude more.conf\n");
        write("more.conf", "plugstackconfig = other.conf # here\n");
        write("other.conf", "# required /x/spank_mizzen.so\nrequired /x/other.so a\ninclude d/*.conf\n");
        write("d/.a.conf", "required /hidden/spank_mizzen.so\n");
        write("d/a.conf", "Include b\nneeded /x/spank_mizzen.so\ninclude ../other.conf\n");
        write("d/b.conf", "\n optional\t/x/spank_mizzen.so config=/srv/m.toml  x # y\n");
        write("d/c.conf", "required /x/spank_mizzen.so\n");
        let line = find_in(&path(&top)).unwrap();
        assert_eq!(
            (line.word.as_str(), line.plugin.as_path()),
            ("optional", Path::new("/x/spank_mizzen.so"))
        );
        assert_eq!((line.arguments.join(" "), line.number), ("config=/srv/m.toml x".to_owned(), 2));
        assert_eq!(line.file.canonicalize().unwrap(), top.join("d/b.conf").canonicalize().unwrap());
        write("more.conf", "");
        assert_eq!(path(&top), top.join("plugstack.conf"));
        assert_eq!(find_in(&path(&top)), None);
        fs::remove_dir_all(top).unwrap();
    }
}
