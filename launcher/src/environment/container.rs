//! What a file says, as options say it: the image, and the settings.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use mizzen_core::device::DeviceName;
use mizzen_core::environment::Environment;
use mizzen_core::failure::quote;
use mizzen_core::find_image::is_file_name;
use mizzen_core::options::{
    EnvOption, MountFlags, MountOption, MountSource, expected_of_a_shell, looks_like_name, parse_mount, split,
};
use mizzen_core::reference::names_a_registry;
use mizzen_core::settings::{Value, Workdir, Writable};
use mizzen_core::{Failure, Settings};

use super::document::Placed;
use super::{Loaded, Table, annotations};

const HOME: &str = "write ${HOME}, or \\~ for a directory of that name";

/// The container that a file describes.
pub fn describe(loaded: &Loaded) -> Result<Environment, Failure> {
    let document = &loaded.document;
    let mut settings = Settings {
        // Where a file says nothing: as CSCS's users know it.
        workdir: Some(workdir(document.workdir.as_ref())?),
        entrypoint: Some(document.entrypoint.unwrap_or(true)),
        writable: Some(if document.writable.unwrap_or(true) { Writable::Yes } else { Writable::No }),
        ..Settings::default()
    };
    let mut mounts = Vec::new();
    for mount in &document.mounts {
        mounts.push(read_mount(&mount.value).map_err(|failure| mount.about("mounts", failure))?);
    }
    for device in &document.devices {
        let read = read_device(&device.value, &mut settings, &mut mounts);
        read.map_err(|failure| device.about("devices", failure))?;
    }
    settings.mounts = Some(mounts).filter(|mounts| !mounts.is_empty());
    settings.environment = Some(variables(&document.env)?).filter(|variables| !variables.is_empty());
    let mut notes = Vec::new();
    annotations::apply(&document.annotations, &mut settings, &mut notes)?;
    let file = loaded.files.last().map(|file| quote(file.as_os_str().as_encoded_bytes()));
    let image = document
        .image
        .as_ref()
        .map(|image| (format!("{}: image", image.place), image_option(&image.value).into_bytes()));
    Ok(Environment { file: file.unwrap_or_default(), image, settings, notes })
}

/// An image as `--container-image` takes it. There a name without a scheme is a file's, here it is a registry's, unless it looks
/// like a file's.
pub fn image_option(image: &str) -> String {
    let is_path = image.starts_with(['.', '/']) || is_file_name(Path::new(image));
    if is_path || image.contains("://") || names_a_registry(image.as_bytes()) {
        return image.to_owned();
    }
    format!("docker://{image}")
}

fn workdir(given: Option<&Placed<String>>) -> Result<Workdir, Failure> {
    match given.filter(|workdir| !workdir.value.is_empty()) {
        Some(workdir) => {
            Value::parse(workdir.value.as_bytes()).map_err(|failure| workdir.about("workdir", failure))
        }
        None => Ok(Workdir::Image),
    }
}

/// `SRC[:DST[:FLAGS]]` with flags joined by + or commas, and `sqsh` for squashfs. A dollar that is still there is meant.
fn read_mount(text: &str) -> Result<MountOption, Failure> {
    let mut fields: Vec<Vec<u8>> = split(text.as_bytes(), b':');
    if fields.iter().take(2).any(|field| expected_of_a_shell(field).as_deref() == Some("~")) {
        let message = format!("\"{}\": ~ is not expanded", quote(text.as_bytes()));
        return Err(Failure::new(message).hint(HOME));
    }
    for field in fields.iter_mut().take(2) {
        *field = escape_dollars(field);
    }
    if let Some(flags) = fields.get_mut(2) {
        let words = flags.split(|byte| b"+,".contains(byte));
        let words = words.map(|word| if word == b"sqsh" { b"squashfs".as_slice() } else { word });
        *flags = words.collect::<Vec<_>>().join(&b'+');
    }
    parse_mount(&fields.join(&b':'))
}

/// Puts a backslash before every dollar that has none.
fn escape_dollars(text: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(text.len());
    let mut after_backslash = false;
    for byte in text {
        if *byte == b'$' && !after_backslash {
            escaped.push(b'\\');
        }
        escaped.push(*byte);
        after_backslash = *byte == b'\\' && !after_backslash;
    }
    escaped
}

/// A device of a CDI specification, or one by its path, which is mounted: `/dev/fuse`, `/dev/fuse:/dev/fuse`, `/dev/fuse:rw`.
fn read_device(text: &str, settings: &mut Settings, mounts: &mut Vec<MountOption>) -> Result<(), Failure> {
    if !text.starts_with('/') {
        settings.devices.get_or_insert_default().push(DeviceName::parse(text.as_bytes())?);
        return Ok(());
    }
    let bad = |why: &str| {
        Failure::new(format!("\"{}\": {why}", quote(text.as_bytes())))
            .hint("write the path of a device below /dev, as /dev/fuse, or its name in a CDI specification, as nvidia.com/gpu=0")
    };
    let is_permissions = |part: &str| !part.is_empty() && part.chars().all(|letter| "rwm".contains(letter));
    let mut parts: Vec<&str> = text.split(':').collect();
    // Never the path itself, which begins with a slash.
    let permissions = parts.pop_if(|part| is_permissions(part));
    let (source, target) = match parts.as_slice() {
        [source] => (*source, *source),
        [source, target] => (*source, *target),
        _ => return Err(bad("not the path of a device")),
    };
    for path in [source, target].map(Path::new) {
        let is_plain = path.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
        if !is_plain || !path.starts_with("/dev") || path == Path::new("/dev") {
            return Err(bad("not the path of a device"));
        }
        if path.to_string_lossy().contains(|letter: char| letter.is_control()) {
            return Err(bad("control character"));
        }
    }
    let read_only = permissions.is_some_and(|letters| !letters.contains('w'));
    let flags = MountFlags { read_only, ..MountFlags::default() };
    mounts.push(MountOption {
        source: MountSource::Bind(source.into()),
        target: PathBuf::from(target),
        flags,
        no_fail: false,
        create: None,
        without_effect: Vec::new(),
    });
    Ok(())
}

fn variables(table: &Table) -> Result<Vec<EnvOption>, Failure> {
    let read = |(name, value): (&String, &Placed<String>)| {
        if !looks_like_name(name.as_bytes()) {
            let shown = quote(name.as_bytes());
            let failure = Failure::new(format!("\"{shown}\" is not a variable's name"));
            return Err(value.about("env", failure.hint("letters, digits and _, and no digit first")));
        }
        let name = OsString::from(name);
        Ok(match value.value.as_str() {
            "" => EnvOption::Unset(name),
            text => EnvOption::Set(name, text.into()),
        })
    };
    table.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::super::document::Document;
    use super::super::expand::Expander;
    use super::*;
    use mizzen_core::settings::Key;

    fn environment(text: &str) -> Result<Environment, String> {
        let variable = |name: &str| (name == "COST").then(|| OsString::from("5$"));
        let path = PathBuf::from("/e/a.toml");
        let document = Document::parse(text, &path, &mut Expander::new(&variable));
        let described = document.and_then(|document| describe(&Loaded { document, files: vec![path] }));
        described.map_err(|failure| failure.message)
    }

    fn settings(text: &str) -> String {
        let Environment { settings, .. } = environment(text).unwrap();
        let shown =
            |key: &Key| Some(format!("{}={}", key.name(), String::from_utf8(settings.text(*key)?).unwrap()));
        Key::ALL.iter().filter_map(shown).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_key_becomes_a_setting() {
        for (text, expected) in [
            ("", "workdir=image: writable=yes entrypoint=yes"),
            (
                "workdir = ''\nwritable = false\nentrypoint = false",
                "workdir=image: writable=no entrypoint=no",
            ),
            ("workdir = '/w'", "workdir=/w writable=yes entrypoint=yes"),
            (
                "mounts = ['/a', '/b:/c:ro,noexec', '/d.sqsh:/d:sqsh+ro', 'tmpfs:/t', '/x,y:/z', '/${COST}a:/p', './r:/r']",
                "mounts=/a:/a:rw,/b:/c:ro+noexec,/d.sqsh:/d:squashfs+ro,tmpfs:/t:rw,/x\\,y:/z:rw,/5\\$a:/p:rw,./r:/r:rw \
                 workdir=image: writable=yes entrypoint=yes",
            ),
            (
                "devices = ['nvidia.com/gpu=all', '/dev/fuse', '/dev/a:/dev/b:r', '/dev/net/tun:rwm']",
                "mounts=/dev/fuse:/dev/fuse:rw,/dev/a:/dev/b:ro,/dev/net/tun:/dev/net/tun:rw device=nvidia.com/gpu=all \
                 workdir=image: writable=yes entrypoint=yes",
            ),
            ("[env]\nA = 'x,y'\nB = ''", "env=!B,A=x\\,y workdir=image: writable=yes entrypoint=yes"),
            (
                "[annotations]\ncom.hooks.cxi.enabled = 'true'",
                "workdir=image: writable=yes entrypoint=yes fabric=host",
            ),
        ] {
            assert_eq!(settings(text), expected, "{text}");
        }
    }

    #[test]
    fn an_image_is_a_registrys_unless_it_looks_like_a_file() {
        for (image, option) in [
            ("ubuntu:24.04", "docker://ubuntu:24.04"),
            ("nvcr.io#nvidia/pytorch:24.01-py3", "nvcr.io#nvidia/pytorch:24.01-py3"),
            ("me@registry.io#team/x", "me@registry.io#team/x"),
            ("me@ubuntu", "docker://me@ubuntu"),
            ("nvcr.io/nvidia/pytorch", "docker://nvcr.io/nvidia/pytorch"),
            ("docker://busybox", "docker://busybox"),
            ("/images/x.sqsh", "/images/x.sqsh"),
            ("./x", "./x"),
            ("x.sqsh", "x.sqsh"),
            ("tf.squashfs", "tf.squashfs"),
        ] {
            let Environment { image: found, file, .. } =
                environment(&format!("\nimage = '{image}'")).unwrap();
            assert_eq!(found, Some(("/e/a.toml:2: image".to_owned(), option.as_bytes().to_vec())));
            assert_eq!(file, "/e/a.toml");
        }
    }

    #[test]
    fn bad_values_are_named_with_file_line_and_key() {
        for (text, message) in [
            ("mounts = ['/a:b']", ":1: mounts: \"/a:b\": the destination is not absolute"),
            ("mounts = [\n'/a:/b:shiny']", ":2: mounts: \"/a:/b:shiny\": unknown flag \"shiny\""),
            ("mounts = ['~/a:/a']", ":1: mounts: \"~/a:/a\": ~ is not expanded"),
            ("devices = ['gpu']", ":1: devices: \"gpu\" is not the name of a device"),
            ("devices = ['/etc/passwd']", ":1: devices: \"/etc/passwd\": not the path of a device"),
            ("devices = ['/dev/../etc']", ":1: devices: \"/dev/../etc\": not the path of a device"),
            ("devices = ['/dev']", ":1: devices: \"/dev\": not the path of a device"),
            ("[env]\n'A B' = 'x'", ":2: env: \"A B\" is not a variable's name"),
            ("workdir = \"a\\nb\"", ":1: workdir: \"a\\nb\" is not a directory's name"),
        ] {
            let found = environment(text).unwrap_err();
            assert_eq!(found.strip_prefix("/e/a.toml"), Some(message), "{text}");
        }
    }
}
