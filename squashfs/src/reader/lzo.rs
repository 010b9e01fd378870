//! Decompression of LZO1X, of which no kept crate in safe Rust exists.
//!
//! Written from the description of the stream in the kernel's Documentation/staging/lzo.rst.
//!
//! Run by: the user, in the launcher and in the FUSE server process.

/// The input is not an LZO1X stream, or its output does not fit.
#[derive(Debug)]
pub struct Malformed;

/// Distances of long matches start here; the encoded distance 0 marks the end of the stream instead.
const FAR: usize = 16384;

/// What preceded an instruction; the meaning of the codes 0 to 15 depends on it.
#[derive(Clone, Copy, PartialEq)]
enum Previous {
    /// A match without literals behind it.
    Match,
    /// A match with one to three literals behind it.
    FewLiterals,
    /// A run of four or more literals.
    LiteralRun,
}

/// Decompresses `input` into `output` and returns how many bytes that gave.
pub fn decompress(input: &[u8], output: &mut [u8]) -> Result<usize, Malformed> {
    let mut stream = Stream { input, output, written: 0 };
    let mut previous = Previous::Match;
    // Only the first code may be a short literal run of its own.
    if let Some(&first) = input.first()
        && first > 17
    {
        stream.byte()?;
        let count = usize::from(first) - 17;
        stream.literals(count)?;
        previous = if count < 4 { Previous::FewLiterals } else { Previous::LiteralRun };
    }
    loop {
        let code = stream.byte()?;
        if code < 16 && previous == Previous::Match {
            let count = stream.length(code, 15)? + 3;
            stream.literals(count)?;
            previous = Previous::LiteralRun;
            continue;
        }
        let Some(Match { distance, length, literals }) = stream.next_match(code, previous)? else {
            return Ok(stream.written);
        };
        stream.copy(distance, length)?;
        stream.literals(literals)?;
        previous = if literals == 0 { Previous::Match } else { Previous::FewLiterals };
    }
}

/// "Copy `length` bytes from `distance` bytes back, then `literals` bytes from the input."
struct Match {
    distance: usize,
    length: usize,
    literals: usize,
}

struct Stream<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
    written: usize,
}

impl Stream<'_> {
    fn byte(&mut self) -> Result<u8, Malformed> {
        let (&first, rest) = self.input.split_first().ok_or(Malformed)?;
        self.input = rest;
        Ok(first)
    }

    /// A length whose low bits are in the code; zero there means `base` plus a run of zero bytes (255 each)
    /// plus the byte that ends the run. It cannot overflow: each step consumes a byte of the input.
    fn length(&mut self, low: u8, base: usize) -> Result<usize, Malformed> {
        if low != 0 {
            return Ok(low.into());
        }
        let mut length = base;
        loop {
            match self.byte()? {
                0 => length += 255,
                last => return Ok(length + usize::from(last)),
            }
        }
    }

    /// The match that `code` starts; `None` is the end of the stream.
    fn next_match(&mut self, code: u8, previous: Previous) -> Result<Option<Match>, Malformed> {
        let value = usize::from(code);
        if code >= 64 {
            let distance = (usize::from(self.byte()?) << 3) + ((value >> 2) & 7) + 1;
            return Ok(Some(Match { distance, length: (value >> 5) + 1, literals: value & 3 }));
        }
        if code >= 16 {
            let near = code >= 32;
            let length = if near { self.length(code & 31, 31)? } else { self.length(code & 7, 7)? } + 2;
            let word = usize::from(u16::from_le_bytes([self.byte()?, self.byte()?]));
            let distance = match ((value & 8) << 11) + (word >> 2) {
                _ if near => (word >> 2) + 1,
                0 => return Ok(None),
                far => far + FAR,
            };
            return Ok(Some(Match { distance, length, literals: word & 3 }));
        }
        let distance = (usize::from(self.byte()?) << 2) + (value >> 2);
        Ok(Some(match previous {
            Previous::LiteralRun => Match { distance: distance + 2049, length: 3, literals: value & 3 },
            _ => Match { distance: distance + 1, length: 2, literals: value & 3 },
        }))
    }

    fn literals(&mut self, count: usize) -> Result<(), Malformed> {
        let (literals, rest) = self.input.split_at_checked(count).ok_or(Malformed)?;
        self.output.get_mut(self.written..self.written + count).ok_or(Malformed)?.copy_from_slice(literals);
        self.input = rest;
        self.written += count;
        Ok(())
    }

    /// Copies from the output so far; where source and destination overlap, the copied bytes repeat.
    fn copy(&mut self, distance: usize, length: usize) -> Result<(), Malformed> {
        let from = self.written.checked_sub(distance).ok_or(Malformed)?;
        let end = self.written + length;
        let window = self.output.get_mut(from..end).ok_or(Malformed)?;
        let mut done = 0;
        while done < length {
            let step = (length - done).min(distance + done);
            window.copy_within(..step, distance + done);
            done += step;
        }
        self.written = end;
        Ok(())
    }
}
