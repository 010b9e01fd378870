//! What `mizzen run` reached, as `strace -y` tells: whether the links of an image have led it out of the image.

/// What strace must be asked for: every call that takes a path, and every descriptor with the file behind it.
pub const STRACE: &str = "strace -y -s 256 -e trace=%file,openat2,open_tree,move_mount -e signal=none";

/// The image in the launcher's workshop, and what is put together there.
const IN_WORKSHOP: [&str; 3] = ["/image", "/root", "/places"];
/// Where the launcher may make files and directories: its own tmpfs. /dev is in the image itself where that has a place
/// for every mount.
const OURS: [&str; 3] = ["/places", "/root/dev", "/image/dev"];

/// The calls that reach out of an image, as long as the host can be seen. `image` is its path, `victims` begin the
/// paths that nobody has a reason to touch.
pub fn escapes<'a>(trace: &'a str, image: &str, victims: &str) -> Vec<&'a str> {
    let mut inside = vec![image];
    let mut found = Vec::new();
    for line in trace.lines().filter(|line| !line.starts_with("execve(")) {
        if line.starts_with("pivot_root(\".\", \".\")") {
            break;
        }
        let call = Call::parse(line);
        let in_workshop = inside.len() > 1;
        if line.contains(&format!("<{victims}"))
            || call.names_badly(image, victims, in_workshop)
            || call.leaves(&inside)
            || call.makes_elsewhere()
        {
            found.push(line);
        }
        if line.starts_with("pivot_root(\".\", \"host\")") {
            inside = IN_WORKSHOP.to_vec();
        }
    }
    found
}

/// Whether the trace goes on to the moment when the host cannot be seen any more.
pub fn is_complete(trace: &str) -> bool {
    trace.contains("\npivot_root(\".\", \".\")")
}

struct Call<'a> {
    line: &'a str,
    name: &'a str,
    /// The directory that its path is relative to.
    directory: Option<&'a str>,
    /// Its paths.
    paths: Vec<&'a str>,
    /// The file behind the descriptor that it returned.
    result: Option<&'a str>,
}

impl<'a> Call<'a> {
    fn parse(line: &'a str) -> Call<'a> {
        let (name, arguments) = line.split_once('(').unwrap_or((line, ""));
        let mut paths: Vec<&str> = arguments.split('"').skip(1).step_by(2).collect();
        match name {
            // The text of a link is no path that the call follows.
            "readlink" | "readlinkat" => paths.truncate(1),
            "symlink" | "symlinkat" => drop(paths.drain(..paths.len().min(1))),
            _ => {}
        }
        let arguments = if name == "symlinkat" {
            arguments.split_once(", ").map_or("", |(_, rest)| rest)
        } else {
            arguments
        };
        let result = arguments.rsplit_once(") = ").and_then(|(_, result)| file(result));
        Call { line, name, directory: file(arguments), paths, result }
    }

    /// Whether it names a victim, or something in the image by a path whose links the kernel would follow.
    fn names_badly(&self, image: &str, victims: &str, in_workshop: bool) -> bool {
        self.paths.iter().any(|path| {
            let deep = path.starts_with('/') && path.matches('/').count() > 1;
            path.starts_with(victims)
                || path.starts_with(&format!("{image}/"))
                || in_workshop && deep && !path.starts_with("/proc/self/")
        })
    }

    /// Whether it starts in the image and ends elsewhere, or may do so.
    fn leaves(&self, inside: &[&str]) -> bool {
        let within = |path: &str| inside.iter().any(|root| below(path, root));
        if !self.directory.is_some_and(within) {
            return false;
        }
        let upward =
            self.paths.iter().any(|path| path.starts_with('/') || path.split('/').any(|name| name == ".."));
        let led_out = self.name.starts_with("openat") && self.result.is_some_and(|result| !within(result));
        let follows = ["newfstatat", "statx", "faccessat", "faccessat2"].contains(&self.name)
            && self.paths.iter().any(|path| !path.is_empty())
            && !self.line.contains("AT_SYMLINK_NOFOLLOW");
        upward || led_out || follows
    }

    /// Whether it makes or removes something that is not the launcher's own.
    fn makes_elsewhere(&self) -> bool {
        let makes =
            ["mkdirat", "mknodat", "symlinkat", "linkat", "unlinkat", "renameat", "renameat2", "fchmodat"];
        let makes = makes.contains(&self.name) || self.line.contains("O_CREAT");
        makes && self.directory.is_some_and(|directory| !OURS.iter().any(|ours| below(directory, ours)))
    }
}

/// The file of a descriptor, at the beginning of the text: `3</etc/hosts>`.
fn file(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    if rest.len() == text.len() {
        return None;
    }
    Some(rest.strip_prefix('<')?.split_once('>')?.0)
}

fn below(path: &str, root: &str) -> bool {
    path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_seen() {
        let host = |line: &str| escapes(line, "/i", "/opt/victim").len();
        let workshop = |line: &str| {
            escapes(&format!("pivot_root(\".\", \"host\") = 0\n{line}"), "/i", "/opt/victim").len()
        };
        for bad in [
            r#"openat(AT_FDCWD</home>, "/opt/victim/file", O_RDONLY) = -1 ENOENT"#,
            r#"openat(3</i>, "etc", O_RDONLY) = 4</etc>"#,
            r#"openat(3</i>, "../x", O_RDONLY|O_NOFOLLOW) = -1 ENOENT (No such file or directory)"#,
            r#"newfstatat(3</i/etc>, "hosts", {st_mode=S_IFREG|0644, ...}, 0) = 0"#,
            r#"openat(3</i>, "x", O_WRONLY|O_CREAT) = 4</i/x>"#,
            r#"statx(AT_FDCWD</home>, "/i/etc/hosts", AT_STATX_SYNC_AS_STAT, STATX_ALL) = 0"#,
            r#"openat(AT_FDCWD</home>, "link", O_RDONLY) = 4</opt/victim/file>"#,
        ] {
            assert_eq!(host(bad), 1, "{bad}");
        }
        for bad in [
            r#"openat2(3</root>, "etc/hosts", {flags=O_PATH}, 24) = 4</host/etc/hosts>"#,
            r#"mkdirat(3</root/tmp>, "alice", 0755) = 0"#,
            r#"openat(3</root/etc>, "hosts", O_WRONLY|O_CREAT, 0644) = 4</root/etc/hosts>"#,
            r#"mount("/proc/self/fd/3", "/root/etc/hosts", NULL, MS_BIND, NULL) = 0"#,
            r#"mkdir("/root/etc/x", 0755) = 0"#,
        ] {
            assert_eq!(workshop(bad), 1, "{bad}");
        }
        for good in [
            r#"openat(AT_FDCWD</home>, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3</etc/passwd>"#,
            r#"readlinkat(3</i>, "etc", "/opt/victim", 256) = 11"#,
            r#"openat(3</i>, "etc", O_RDONLY|O_NOFOLLOW|O_PATH) = 4</i/etc>"#,
        ] {
            assert_eq!(host(good), 0, "{good}");
        }
        for good in [
            r#"mkdirat(3</places>, "opt", 0755) = 0"#,
            r#"openat2(3</root>, "opt/victim/hosts", {flags=O_PATH}, 24) = 4</root/opt/victim/hosts>"#,
            r#"mount("/proc/self/fd/3", "/proc/self/fd/4", NULL, MS_BIND, NULL) = 0"#,
        ] {
            assert_eq!(workshop(good), 0, "{good}");
        }
    }
}
