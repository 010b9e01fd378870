//! What `mizzen doctor` sees of Slurm's configuration: is the plugin named, there, and of the same build as this launcher?
//! Runs as the user on the host; reads files alone.

use std::fs;
use std::path::{Path, PathBuf};

use mizzen_core::failure::{cause, quote};
use mizzen_core::{Failure, SlurmConf, build, pattern};

/// The plugin's file, whatever its directory.
const PLUGIN: &str = "spank_mizzen.so";
/// Files that include each other end somewhere.
const INCLUDE_DEPTH: usize = 8;

/// The line of plugstack.conf that loads the plugin.
struct Line {
    word: String,
    plugin: PathBuf,
    file: PathBuf,
}

/// Sees that plugstack.conf names the plugin, and that it is there and fits.
pub fn plugin() -> Result<String, Failure> {
    let Some(directory) = slurm_directory() else {
        return Ok("no slurm.conf on this machine".to_owned());
    };
    let conf = SlurmConf::read(Some(&directory.join("slurm.conf")));
    let named = conf.as_ref().and_then(|conf| conf.value("PlugStackConfig")).map(PathBuf::from);
    let plugstack = named.unwrap_or_else(|| directory.join("plugstack.conf"));
    let Some(line) = find_line(&plugstack, INCLUDE_DEPTH) else {
        let message = format!("{} has no line with {PLUGIN}", plugstack.display());
        return Err(Failure::new(message)
            .hint("add `required /usr/lib/mizzen/spank_mizzen.so`, or include plugstack.conf.d/*.conf"));
    };
    let (plugin, file) = (line.plugin.display(), line.file.display());
    let bytes = fs::read(&line.plugin).map_err(|error| {
        Failure::new(format!("{file} names {plugin}: {}", cause(&error)))
            .hint("every srun and job fails here until the file is there, or the line is gone")
    })?;
    match build::find(&bytes) {
        Some(theirs) if theirs == build::NAME => {}
        other => {
            let theirs = other.map_or_else(|| "an older build".to_owned(), |name| quote(name.as_bytes()));
            let message = format!("{plugin} is {theirs}, and this launcher {}", build::NAME);
            return Err(Failure::new(message).hint("install both from the same package, on all nodes"));
        }
    }
    let risk =
        if line.word == "required" { "" } else { "; optional: where it is missing, jobs run on the node" };
    Ok(format!("{plugin}, by {file}{risk}"))
}

/// Whose `--container` is.
pub fn runtime() -> Result<String, Failure> {
    match slurm_directory().map(|directory| directory.join("oci.conf")).filter(|file| file.exists()) {
        Some(file) => {
            Err(Failure::new(format!("{} gives --container to Slurm's own runtime", file.display()))
                .hint("--container-image is mizzen's; without oci.conf --container is, too"))
        }
        None => Ok("--container is mizzen's".to_owned()),
    }
}

fn slurm_directory() -> Option<PathBuf> {
    SlurmConf::find_directory(std::env::var_os("SLURM_CONF").map(PathBuf::from).as_deref())
}

/// The line, in this file or in those that it includes.
fn find_line(file: &Path, depth: usize) -> Option<Line> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let (word, path) = (words.next()?, Path::new(words.next()?));
        let path = file.parent().unwrap_or(Path::new("/")).join(path);
        if word.eq_ignore_ascii_case("include") {
            let included = || included_files(&path).into_iter().find_map(|file| find_line(&file, depth - 1));
            return (depth > 0).then(included).flatten();
        }
        let ours = path.file_name().is_some_and(|name| name == PLUGIN || name == "libspank_mizzen.so");
        ours.then(|| Line { word: word.to_owned(), plugin: path, file: file.to_owned() })
    })
}

/// The files that an include names; its last part may be a pattern.
fn included_files(path: &Path) -> Vec<PathBuf> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
    else {
        return Vec::new();
    };
    let entries = fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let named =
        entries.filter(|entry| entry.file_name().to_str().is_some_and(|own| pattern::matches(name, own)));
    let mut files: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    files.sort();
    files
}
