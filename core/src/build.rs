//! Which build this is. The plugin and the launcher hand things to each other, so they must be of one build.

/// The version, with the commit where the Makefile knows it.
pub const NAME: &str = match option_env!("MIZZEN_BUILD") {
    Some(name) => name,
    None => env!("CARGO_PKG_VERSION"),
};

const MARK: &[u8] = b"mizzen-build:";
const END: u8 = 0;

/// The name as it can be found in the file of a program that has it as a static.
pub const MARKED: [u8; MARK.len() + NAME.len() + 1] = {
    let mut marked = [END; MARK.len() + NAME.len() + 1];
    let mut at = 0;
    while at < MARK.len() + NAME.len() {
        marked[at] = if at < MARK.len() { MARK[at] } else { NAME.as_bytes()[at - MARK.len()] };
        at += 1;
    }
    marked
};

/// The name in the file of a program.
pub fn find(file: &[u8]) -> Option<&str> {
    let behind = file.windows(MARK.len()).position(|bytes| bytes == MARK)? + MARK.len();
    let name = file.get(behind..)?.split(|byte| *byte == END).next()?;
    std::str::from_utf8(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_tells_its_build() {
        let file = [b"\x7fELF....".as_slice(), &MARKED, b"more"].concat();
        assert_eq!(find(&file), Some(NAME));
        assert_eq!(find(b"\x7fELF"), None);
    }
}
