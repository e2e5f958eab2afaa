//! The instructions, by id, and whether a reply follows them. What each asks is what Google's `instructions.py` checks;
//! keywords are taken as text, which there are regular expressions.

use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::language::{Language, is_language};
use super::{sentences, words};

/// How a count is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// As many or more.
    AtLeast(usize),
    /// Fewer.
    LessThan(usize),
}

impl Relation {
    fn holds(self, count: usize) -> bool {
        match self {
            Self::AtLeast(bound) => count >= bound,
            Self::LessThan(bound) => count < bound,
        }
    }
}

/// What a reply has to look like.
#[derive(Clone, Debug)]
pub enum Instruction {
    /// All of these occur.
    Keywords(Vec<Regex>),
    /// A word occurs so often.
    KeywordFrequency(Regex, Relation),
    /// None of these occurs as a word.
    Forbidden(Vec<Regex>),
    /// A letter occurs so often.
    LetterFrequency(char, Relation),
    /// It is in a language.
    Language(Language),
    /// So many sentences.
    Sentences(Relation),
    /// So many paragraphs between `***`.
    Paragraphs(usize),
    /// So many words.
    Words(Relation),
    /// So many paragraphs between blank lines, and one begins with a word.
    FirstWord {
        /// Paragraphs.
        paragraphs: usize,
        /// Which one, from 1.
        nth: usize,
        /// Its first word, in small letters.
        word: String,
    },
    /// So many `[placeholders]`, or more.
    Placeholders(usize),
    /// A line with a postscript.
    Postscript(Regex),
    /// So many bullets.
    Bullets(usize),
    /// One of three sentences.
    Constrained,
    /// So many `*highlights*`, or more.
    Highlights(usize),
    /// So many sections that begin with a word and a number, or more.
    Sections(Regex, usize),
    /// It is JSON.
    Json,
    /// It has a `<<title>>`.
    Title,
    /// Two different parts with `******` between.
    TwoResponses,
    /// It begins with a text.
    Repeats(String),
    /// It ends with a text.
    Ends(String),
    /// So many words in capitals.
    CapitalWords(Relation),
    /// English in capitals.
    Capitals,
    /// English in small letters.
    Lowercase,
    /// No commas.
    NoComma,
    /// Quotation marks around it.
    Quotation,
}

impl PartialEq for Instruction {
    fn eq(&self, other: &Self) -> bool {
        // Expressions have no equality of their own, and show their source.
        format!("{self:?}") == format!("{other:?}")
    }
}

/// The arguments of an instruction.
struct Arguments<'a> {
    id: &'a str,
    values: Option<&'a Map<String, Value>>,
}

impl Arguments<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.values?.get(name).filter(|value| !value.is_null())
    }

    fn number(&self, name: &str) -> Result<usize, String> {
        let value = self.get(name);
        // Some copies of the set went through tables that have no integers.
        let number = value.and_then(|value| {
            value.as_u64().or_else(|| {
                value.as_f64().filter(|v| v.fract() == 0.0 && (0.0..1e9).contains(v)).map(|v| v as u64)
            })
        });
        let number = number.and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| format!("`{}` needs a number `{name}`", self.id))
    }

    fn text(&self, name: &str) -> Result<&str, String> {
        let text = self.get(name).and_then(Value::as_str);
        text.ok_or_else(|| format!("`{}` needs a text `{name}`", self.id))
    }

    fn texts(&self, name: &str) -> Result<Vec<&str>, String> {
        let texts =
            self.get(name).and_then(Value::as_array).map(|texts| texts.iter().map(Value::as_str).collect());
        let texts: Option<Option<Vec<&str>>> = texts;
        let texts = texts.flatten().filter(|texts| !texts.is_empty());
        texts.ok_or_else(|| format!("`{}` needs a list of texts `{name}`", self.id))
    }

    fn relation(&self, name: &str, bound: usize) -> Result<Relation, String> {
        match self.get(name).map(|relation| relation.as_str()) {
            None | Some(Some("at least")) => Ok(Relation::AtLeast(bound)),
            Some(Some("less than")) => Ok(Relation::LessThan(bound)),
            Some(_) => Err(format!("`{}`: `{name}` is neither `at least` nor `less than`", self.id)),
        }
    }
}

/// An expression over a text that is taken as it is.
fn literal(before: &str, text: &str, after: &str) -> Result<Regex, String> {
    let built = RegexBuilder::new(&format!("{before}{}{after}", regex::escape(text)))
        .case_insensitive(true)
        .multi_line(true)
        .build();
    built.map_err(|_| format!("`{text}` is too long"))
}

impl Instruction {
    /// From its id and arguments.
    ///
    /// # Errors
    /// There is no such instruction, or an argument is missing or impossible.
    pub fn read(id: &str, arguments: &Value) -> Result<Self, String> {
        let arguments = Arguments { id, values: arguments.as_object() };
        let relation = |name: &str, bound: &str| arguments.relation(name, arguments.number(bound)?);
        Ok(match id {
            "keywords:existence" => Self::Keywords(
                arguments
                    .texts("keywords")?
                    .iter()
                    .map(|word| literal("", word, ""))
                    .collect::<Result<_, _>>()?,
            ),
            "keywords:frequency" => Self::KeywordFrequency(
                literal("", arguments.text("keyword")?.trim(), "")?,
                relation("relation", "frequency")?,
            ),
            "keywords:forbidden_words" => {
                let words = arguments.texts("forbidden_words")?;
                Self::Forbidden(
                    words.iter().map(|word| literal(r"\b", word, r"\b")).collect::<Result<_, _>>()?,
                )
            }
            "keywords:letter_frequency" => {
                let mut letters = arguments.text("letter")?.trim().chars();
                let (Some(letter), None) = (letters.next(), letters.next()) else {
                    return Err(format!("`{id}`: `letter` is not one letter"));
                };
                Self::LetterFrequency(letter, relation("let_relation", "let_frequency")?)
            }
            "language:response_language" => {
                let code = arguments.text("language")?;
                Self::Language(Language::named(code).ok_or_else(|| format!("`{id}`: no language `{code}`"))?)
            }
            "length_constraints:number_sentences" => Self::Sentences(relation("relation", "num_sentences")?),
            "length_constraints:number_paragraphs" => Self::Paragraphs(arguments.number("num_paragraphs")?),
            "length_constraints:number_words" => Self::Words(relation("relation", "num_words")?),
            "length_constraints:nth_paragraph_first_word" => Self::FirstWord {
                paragraphs: arguments.number("num_paragraphs")?,
                nth: arguments.number("nth_paragraph")?.max(1),
                word: arguments.text("first_word")?.to_lowercase(),
            },
            "detectable_content:number_placeholders" => {
                Self::Placeholders(arguments.number("num_placeholders")?)
            }
            "detectable_content:postscript" => {
                Self::Postscript(match arguments.text("postscript_marker")?.trim() {
                    "P.P.S" => P_P_S.clone(),
                    "P.S." => P_S.clone(),
                    marker => literal(r"\s*", marker, ".*$")?,
                })
            }
            "detectable_format:number_bullet_lists" => Self::Bullets(arguments.number("num_bullets")?),
            "detectable_format:constrained_response" => Self::Constrained,
            "detectable_format:number_highlighted_sections" => {
                Self::Highlights(arguments.number("num_highlights")?)
            }
            "detectable_format:multiple_sections" => {
                let word = regex::escape(arguments.text("section_spliter")?.trim());
                let section =
                    Regex::new(&format!(r"\s?{word}\s?\d+\s?")).map_err(|_| format!("`{id}`: too long"))?;
                Self::Sections(section, arguments.number("num_sections")?)
            }
            "detectable_format:json_format" => Self::Json,
            "detectable_format:title" => Self::Title,
            "combination:two_responses" => Self::TwoResponses,
            "combination:repeat_prompt" => {
                Self::Repeats(arguments.text("prompt_to_repeat")?.trim().to_lowercase())
            }
            "startend:end_checker" => Self::Ends(arguments.text("end_phrase")?.trim().to_lowercase()),
            "startend:quotation" => Self::Quotation,
            "change_case:capital_word_frequency" => {
                Self::CapitalWords(relation("capital_relation", "capital_frequency")?)
            }
            "change_case:english_capital" => Self::Capitals,
            "change_case:english_lowercase" => Self::Lowercase,
            "punctuation:no_comma" => Self::NoComma,
            _ => return Err(format!("there is no instruction `{id}`")),
        })
    }

    /// Whether a reply follows it.
    pub fn is_followed(&self, reply: &str) -> bool {
        match self {
            Self::Keywords(words) => words.iter().all(|word| word.is_match(reply)),
            Self::KeywordFrequency(word, relation) => relation.holds(word.find_iter(reply).count()),
            Self::Forbidden(words) => !words.iter().any(|word| word.is_match(reply)),
            Self::LetterFrequency(letter, relation) => {
                let letter: Vec<char> = letter.to_lowercase().collect();
                let lower = reply.to_lowercase();
                relation.holds(lower.chars().filter(|c| letter.first() == Some(c)).count())
            }
            Self::Language(language) => is_language(reply, *language),
            Self::Sentences(relation) => relation.holds(sentences::count(reply)),
            Self::Paragraphs(count) => paragraphs(reply) == Some(*count),
            Self::Words(relation) => relation.holds(words::count(reply)),
            Self::FirstWord { paragraphs, nth, word } => begins_with(reply, *paragraphs, *nth, word),
            Self::Placeholders(count) => PLACEHOLDER.find_iter(reply).count() >= *count,
            Self::Postscript(marker) => marker.is_match(&reply.to_lowercase()),
            Self::Bullets(count) => {
                STAR_BULLET.find_iter(reply).count() + DASH_BULLET.find_iter(reply).count() == *count
            }
            Self::Constrained => ["My answer is yes.", "My answer is no.", "My answer is maybe."]
                .iter()
                .any(|text| reply.contains(text)),
            Self::Highlights(count) => highlights(reply) >= *count,
            Self::Sections(section, count) => section.find_iter(reply).count() >= *count,
            Self::Json => is_json(reply),
            Self::Title => TITLE.find_iter(reply).any(|title| {
                let title = title.as_str().trim_start_matches('<').trim_end_matches('>');
                !title.trim().is_empty()
            }),
            Self::TwoResponses => two_responses(reply),
            Self::Repeats(text) => reply.trim().to_lowercase().starts_with(text.as_str()),
            Self::Ends(text) => reply.trim().trim_matches('"').to_lowercase().ends_with(text.as_str()),
            Self::CapitalWords(relation) => relation.holds(words::capitals(reply)),
            Self::Capitals => words::is_upper(reply) && is_language(&reply.to_lowercase(), Language::English),
            Self::Lowercase => words::is_lower(reply) && is_language(reply, Language::English),
            Self::NoComma => !reply.contains(','),
            Self::Quotation => {
                let reply = reply.trim();
                reply.len() > 1 && reply.starts_with('"') && reply.ends_with('"')
            }
        }
    }
}

macro_rules! expressions {
    ($($name:ident = $expression:literal;)*) => {
        $(
            #[allow(clippy::unwrap_used)] // constants
            static $name: LazyLock<Regex> = LazyLock::new(|| Regex::new($expression).unwrap());
        )*
    };
}

expressions! {
    P_P_S = r"(?m)\s*p\.\s?p\.\s?s.*$";
    P_S = r"(?m)\s*p\.\s?s\..*$";
    PLACEHOLDER = r"\[.*?\]";
    STAR_BULLET = r"(?m)^\s*\*[^\*].*$";
    DASH_BULLET = r"(?m)^\s*-.*$";
    HIGHLIGHT = r"\*[^\n\*]*\*";
    BOLD = r"\*\*[^\n\*]*\*\*";
    TITLE = r"<<[^\n]+>>";
    DIVIDER = r"\s?\*\*\*\s?";
}

/// Paragraphs between `***`; `None` if one inside is empty.
fn paragraphs(reply: &str) -> Option<usize> {
    let parts: Vec<&str> = DIVIDER.split(reply).collect();
    let mut count = parts.len();
    for (index, part) in parts.iter().enumerate() {
        if part.trim().is_empty() {
            if index != 0 && index + 1 != parts.len() {
                return None;
            }
            count -= 1;
        }
    }
    Some(count)
}

fn begins_with(reply: &str, wanted: usize, nth: usize, word: &str) -> bool {
    let paragraphs: Vec<&str> = reply.split("\n\n").collect();
    let count = paragraphs.iter().filter(|paragraph| !paragraph.trim().is_empty()).count();
    if nth > count {
        return false;
    }
    let first = paragraphs.get(nth - 1).and_then(|paragraph| paragraph.split_whitespace().next());
    let Some(first) = first else { return false };
    let first = first.trim_start_matches('\'').trim_start_matches('"');
    let first: String =
        first.chars().take_while(|c| !".,?!'\"".contains(*c)).flat_map(char::to_lowercase).collect();
    count == wanted && first == word
}

fn highlights(reply: &str) -> usize {
    let single =
        HIGHLIGHT.find_iter(reply).filter(|found| !found.as_str().trim_matches('*').trim().is_empty());
    let double = BOLD.find_iter(reply).filter(|found| {
        let inside = found.as_str().strip_prefix("**").and_then(|text| text.strip_suffix("**"));
        !inside.unwrap_or_default().trim().is_empty()
    });
    single.count() + double.count()
}

/// Whether it is JSON, in a fence or not.
fn is_json(reply: &str) -> bool {
    let mut text = reply.trim();
    for fence in ["```json", "```Json", "```JSON", "```"] {
        text = text.strip_prefix(fence).unwrap_or(text);
    }
    let text = text.strip_suffix("```").unwrap_or(text).trim();
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

fn two_responses(reply: &str) -> bool {
    let parts: Vec<&str> = reply.split("******").collect();
    let inside = parts.get(1..parts.len().saturating_sub(1)).unwrap_or_default();
    if inside.iter().any(|part| part.trim().is_empty()) {
        return false;
    }
    let parts: Vec<&str> = parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect();
    matches!(parts[..], [first, second] if first != second)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn follows(id: &str, arguments: Value, reply: &str) -> bool {
        Instruction::read(id, &arguments).unwrap().is_followed(reply)
    }

    #[test]
    fn words_and_letters_are_counted() {
        assert!(follows("keywords:existence", json!({"keywords": ["Sea", "c++"]}), "the sea and C++"));
        assert!(!follows("keywords:existence", json!({"keywords": ["a.c"]}), "abc"));
        let frequency = |relation: &str| json!({"keyword": "ab", "frequency": 2, "relation": relation});
        assert!(follows("keywords:frequency", frequency("at least"), "AB cab"));
        assert!(!follows("keywords:frequency", frequency("less than"), "AB cab"));
        let forbidden = json!({"forbidden_words": ["cat"]});
        assert!(follows("keywords:forbidden_words", forbidden.clone(), "concatenate"));
        assert!(!follows("keywords:forbidden_words", forbidden, "a Cat."));
        let letter = json!({"letter": "Q", "let_frequency": 2, "let_relation": "at least"});
        assert!(follows("keywords:letter_frequency", letter, "Qq"));
    }

    #[test]
    fn paragraphs_have_their_two_meanings() {
        let three = json!({"num_paragraphs": 3});
        assert!(follows("length_constraints:number_paragraphs", three.clone(), "a\n***\nb\n***\nc"));
        assert!(follows(
            "length_constraints:number_paragraphs",
            three.clone(),
            "***\na\n***\nb\n***\nc\n***"
        ));
        assert!(!follows("length_constraints:number_paragraphs", three, "a\n***\n***\nc"));
        let first = json!({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"});
        assert!(follows("length_constraints:nth_paragraph_first_word", first.clone(), "a\n\n\"then, b"));
        assert!(!follows("length_constraints:nth_paragraph_first_word", first.clone(), "a\n\nthence b"));
        assert!(!follows("length_constraints:nth_paragraph_first_word", first, "a\n\nthen b\n\nc"));
    }

    #[test]
    fn formats_are_recognised() {
        assert!(follows("detectable_content:number_placeholders", json!({"num_placeholders": 2}), "[a] [b]"));
        assert!(follows("detectable_content:postscript", json!({"postscript_marker": "P.S."}), "x\nP. S. y"));
        assert!(!follows("detectable_content:postscript", json!({"postscript_marker": "P.S."}), "x\nPS y"));
        assert!(follows(
            "detectable_content:postscript",
            json!({"postscript_marker": "P.P.S"}),
            "x\np.p.s y"
        ));
        assert!(follows(
            "detectable_format:number_bullet_lists",
            json!({"num_bullets": 2}),
            "* a\n- b\n** c"
        ));
        assert!(follows("detectable_format:constrained_response", json!({}), "My answer is no."));
        assert!(follows(
            "detectable_format:number_highlighted_sections",
            json!({"num_highlights": 1}),
            "*a*"
        ));
        assert!(!follows(
            "detectable_format:number_highlighted_sections",
            json!({"num_highlights": 1}),
            "* *"
        ));
        let sections = json!({"section_spliter": "Section", "num_sections": 2});
        assert!(follows("detectable_format:multiple_sections", sections, "Section 1\na\nSection 2\nb"));
        assert!(follows("detectable_format:json_format", json!({}), "```json\n{\"a\": 1}\n```"));
        assert!(!follows("detectable_format:json_format", json!({}), "{a: 1}"));
        assert!(follows("detectable_format:title", json!({}), "<<poem>>\nx"));
        assert!(!follows("detectable_format:title", json!({}), "<< >>"));
    }

    #[test]
    fn beginnings_and_ends_are_compared_without_case() {
        assert!(follows("startend:end_checker", json!({"end_phrase": "Bye."}), "So: \"bye.\"  "));
        assert!(follows("combination:repeat_prompt", json!({"prompt_to_repeat": "Do it"}), "do it: done"));
        assert!(follows("combination:two_responses", json!({}), "a\n******\nb"));
        assert!(!follows("combination:two_responses", json!({}), "a\n******\na"));
        assert!(!follows("combination:two_responses", json!({}), "a******\n******b"));
        assert!(follows("punctuation:no_comma", json!({}), "a; b"));
        assert!(!follows("startend:quotation", json!({}), "\""));
    }

    proptest! {
        #[test]
        fn any_reply_is_checked(reply in "[\\PC\n*]{0,200}", nth in 0usize..5) {
            let cases = [
                ("length_constraints:number_paragraphs", json!({"num_paragraphs": nth})),
                ("length_constraints:nth_paragraph_first_word",
                    json!({"num_paragraphs": nth, "nth_paragraph": nth, "first_word": "a"})),
                ("length_constraints:number_sentences", json!({"num_sentences": nth})),
                ("change_case:capital_word_frequency", json!({"capital_frequency": nth})),
                ("language:response_language", json!({"language": "de"})),
                ("combination:two_responses", json!({})),
                ("detectable_format:number_highlighted_sections", json!({"num_highlights": nth})),
            ];
            for (id, arguments) in cases {
                let _ = follows(id, arguments, &reply);
            }
        }
    }
}
