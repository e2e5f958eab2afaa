//! Character classes as Python's `str` methods see them.

/// The zero of every block of decimal digits (Unicode category Nd).
const DECIMAL_ZEROS: [u32; 58] = [
    0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50,
    0xed0, 0xf20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40,
    0x1c50, 0xa620, 0xa8d0, 0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0xff10, 0x104a0, 0x10d30, 0x11066,
    0x110f0, 0x11136, 0x111d0, 0x112f0, 0x11450, 0x114d0, 0x11650, 0x116c0, 0x11730, 0x118e0, 0x11950,
    0x11c50, 0x11d50, 0x11da0, 0x16a60, 0x1d7ce, 0x1e950, 0x1fbf0,
];

/// Digits that are not decimal: superscripts, subscripts and enclosed digits.
const OTHER_DIGITS: [(u32, u32); 16] = [
    (0xb2, 0xb3),
    (0xb9, 0xb9),
    (0x1369, 0x1371),
    (0x19da, 0x19da),
    (0x2070, 0x2070),
    (0x2074, 0x2079),
    (0x2080, 0x2089),
    (0x2460, 0x2468),
    (0x2474, 0x247c),
    (0x2488, 0x2490),
    (0x24ea, 0x24ea),
    (0x24f5, 0x24fd),
    (0x24ff, 0x24ff),
    (0x2776, 0x277e),
    (0x2780, 0x2788),
    (0x278a, 0x2792),
];

/// `str.isspace`: Unicode whitespace and the four information separators.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Where `str.splitlines` ends a line.
pub(super) fn is_line_break(character: char) -> bool {
    matches!(
        character,
        '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

pub(super) fn is_cased(character: char) -> bool {
    character.is_lowercase() || character.is_uppercase()
}

/// `str.isalpha`; letters only, where the standard library counts letter-like numerals and marks as well.
pub(super) fn is_alpha(character: char) -> bool {
    character.is_alphabetic() && !character.is_numeric()
}

/// `str.isdecimal`.
pub(super) fn is_decimal(character: char) -> bool {
    let code = u32::from(character);
    match code {
        // Five alphabets of mathematical digits follow each other.
        0x1d7ce..=0x1d7ff => true,
        _ => DECIMAL_ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&code)),
    }
}

/// `str.isdigit`.
pub(super) fn is_digit(character: char) -> bool {
    let code = u32::from(character);
    is_decimal(character) || OTHER_DIGITS.iter().any(|(first, last)| (*first..=*last).contains(&code))
}

/// `str.isidentifier`.
pub(super) fn is_identifier(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next().is_some_and(|c| c == '_' || is_alpha(c))
        && characters.all(|c| c == '_' || c.is_alphanumeric())
}
