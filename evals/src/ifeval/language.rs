//! Which language a text is in: by its script where that says it, else by its commonest words. IFEval's own checker asks
//! `langdetect`, whose model of letter sequences is of another size; on replies of a few sentences the two agree.

/// A language that rows name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// English.
    English,
    /// Any other, by its place in the tables.
    Other(&'static str),
}

/// Ranges of characters, ends included.
type Characters = &'static [(u32, u32)];

/// Codes whose script decides, with its ranges of characters.
const SCRIPTS: &[(&[&str], Characters)] = &[
    (&["ko"], &[(0xac00, 0xd7a3), (0x1100, 0x11ff)]),
    (&["ja"], &[(0x3040, 0x30ff)]),
    (&["zh", "zh-cn", "zh-tw"], &[(0x4e00, 0x9fff)]),
    (&["th"], &[(0x0e00, 0x0e7f)]),
    (&["he"], &[(0x0590, 0x05ff)]),
    (&["el"], &[(0x0370, 0x03ff)]),
    (&["hi", "mr", "ne"], &[(0x0900, 0x097f)]),
    (&["bn"], &[(0x0980, 0x09ff)]),
    (&["pa"], &[(0x0a00, 0x0a7f)]),
    (&["gu"], &[(0x0a80, 0x0aff)]),
    (&["ta"], &[(0x0b80, 0x0bff)]),
    (&["te"], &[(0x0c00, 0x0c7f)]),
    (&["kn"], &[(0x0c80, 0x0cff)]),
    (&["ml"], &[(0x0d00, 0x0d7f)]),
    (&["ar", "fa", "ur"], &[(0x0600, 0x06ff), (0x0750, 0x077f)]),
    (&["ru", "uk", "bg", "mk"], &[(0x0400, 0x04ff)]),
];

/// The commonest words, and letters that few others have (after `|`).
const WORDS: &[(&str, &str)] = &[
    (
        "en",
        "the of and to in is that it for you was with as are on be this have not at from they we or an by but your can will i my he she his her their has had more what when there so if all about would do which one|",
    ),
    (
        "es",
        "de la que el en y los se del las un por con no una su para es al lo como más pero sus este muy|ñ¿¡",
    ),
    (
        "pt",
        "de que e o do da em um para com não uma os no se na por mais as dos como mas ao ele das à seu sua ou|ãõ",
    ),
    (
        "fr",
        "de la le et les des en un du une que est pour qui dans par plus pas au sur ne se ce il sont avec nous vous je|œêè",
    ),
    (
        "de",
        "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass sie wir ich|ßäöü",
    ),
    (
        "it",
        "di e il la che in un a per è una del con non sono le della si come da al più dei gli anche ma nel lo|",
    ),
    (
        "nl",
        "de van een het en in is dat op te zijn met voor niet aan er om ook als dan maar bij nog uit wordt|",
    ),
    ("sv", "och i att det som en på är av för med till den har de inte om ett var jag men|åäö"),
    ("pl", "w i na z że się nie do to jest o jak za od po co ale przez tym są czy jego oraz może|ąęłśżźćń"),
    (
        "vi",
        "và của là có trong được cho không một với các người những để khi này đã từ ở như|đơưạảấầẩẫậắằẳẵặẹẻẽếềểễệ",
    ),
    ("fi", "ja on ei se että oli hän mutta ovat kun joka mitä tai jos niin kuin myös sen olen hänen|äö"),
    ("sw", "na ya wa kwa ni katika za la kuwa cha watu hii hiyo au kama lakini pia sana mtu vya yake|"),
    ("tr", "ve bir bu da de için ile çok olarak daha gibi ne en ama olan kadar sonra|ğışç"),
    ("id", "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena ada mereka|"),
    ("cs", "a se v na je že s to z do o i ve jako za by ale jsou který|ěřů"),
    ("ro", "și de în a la cu pe nu este că o un din care mai pentru sau ca fi sunt|șțăîâ"),
    ("da", "og i at det er en til på som for af de med den der ikke har et jeg|æø"),
    ("hu", "a az és hogy nem is egy ez meg de csak volt mint van már|őű"),
    ("ru", "и в не на что с он как это по но из у за к от все так его то мы она|ыэё"),
    ("uk", "і в не на що з як до це та за від у його є для по але він вона|іїєґ"),
    ("bg", "и на да в се не за от е с като са по си ще което това който има|ъ"),
    ("hi", "है के में की और का से को हैं पर एक यह नहीं भी कि जो तो हो था थे ने|"),
    ("mr", "आहे आणि या हे ते आहेत मध्ये एक होते नाही च्या की तर साठी केले|ळ"),
    ("ne", "छ र को मा छन् हो गर्न पनि यो भएको लागि तथा एक थियो गरेको|"),
    ("ar", "في من على أن إلى هذا التي عن مع ما لا هو كان هذه الذي أو كل|ةىأإ"),
    ("fa", "و در به از که این را با است برای آن یک می ها شد تا بر خود هم|پچژگی"),
    ("ur", "کے کی ہے میں اور سے کا کو نے پر ہیں یہ کہ اس ایک بھی نہیں|ٹڈڑںےہ"),
];

impl Language {
    /// By its ISO 639-1 code.
    pub(super) fn named(code: &str) -> Option<Self> {
        if code == "en" {
            return Some(Self::English);
        }
        let scripted = SCRIPTS.iter().flat_map(|(codes, _)| codes.iter());
        let worded = WORDS.iter().map(|(known, _)| known);
        scripted.chain(worded).find(|known| **known == code).map(|known| Self::Other(known))
    }

    fn code(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Other(code) => code,
        }
    }
}

/// Whether a text is in a language. A text without letters is in every one.
pub(super) fn is_language(text: &str, language: Language) -> bool {
    let letters = text.chars().filter(|c| c.is_alphabetic()).count();
    if letters == 0 {
        return true;
    }
    let found = detect(text, letters);
    let wanted = language.code();
    found == wanted || (found == "zh" && wanted.starts_with("zh"))
}

/// The likeliest code.
fn detect(text: &str, letters: usize) -> &'static str {
    let in_script = |ranges: &[(u32, u32)]| {
        let inside = |c: &char| ranges.iter().any(|(from, to)| (*from..=*to).contains(&u32::from(*c)));
        text.chars().filter(|c| c.is_alphabetic()).filter(inside).count()
    };
    // Japanese has Chinese characters among its own, so a share of them decides.
    let kana = in_script(&[(0x3040, 0x30ff)]);
    let han = in_script(&[(0x4e00, 0x9fff)]);
    if (kana + han) * 2 > letters {
        return if kana * 10 > kana + han { "ja" } else { "zh" };
    }
    let script = SCRIPTS.iter().max_by_key(|(_, ranges)| in_script(ranges));
    match script {
        Some(([only], ranges)) if in_script(ranges) * 2 > letters => only,
        Some((codes, ranges)) if in_script(ranges) * 2 > letters => by_words(text, Some(codes)),
        _ => by_words(text, None),
    }
}

/// The language most of whose common words and letters a text has: among `codes`, or those in Latin letters. English if
/// nothing tells.
fn by_words(text: &str, codes: Option<&[&'static str]>) -> &'static str {
    let lower = text.to_lowercase();
    // Vowel signs of Indian scripts are no letters, and belong to words.
    let words: Vec<&str> = lower
        .split(|c: char| c.is_whitespace() || c.is_ascii_punctuation() || "।،؟«»“”’".contains(c))
        .filter(|word| !word.is_empty())
        .collect();
    let scripted = |code: &str| SCRIPTS.iter().any(|(codes, _)| codes.contains(&code));
    let mut best = (codes.and_then(|codes| codes.first()).copied().unwrap_or("en"), 0);
    for (code, known) in WORDS {
        let eligible = match codes {
            Some(codes) => codes.contains(code),
            None => !scripted(code),
        };
        if !eligible {
            continue;
        }
        let (common, letters) = known.split_once('|').unwrap_or((known, ""));
        let common: Vec<&str> = common.split(' ').collect();
        let hits = words.iter().filter(|word| common.contains(word)).count();
        let marks = lower.chars().filter(|c| letters.contains(*c)).count();
        let score = 2 * hits + marks;
        if score > best.1 {
            best = (code, score);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_told_apart() {
        let texts = [
            ("en", "The quick brown fox jumps over the lazy dog and it is not amused."),
            ("de", "Der Hund liegt im Garten und wartet, dass die Sonne untergeht."),
            ("fr", "Le chien dort dans le jardin et les enfants ne font pas de bruit."),
            ("es", "El perro duerme en el jardín y los niños no hacen ruido."),
            ("pt", "O cachorro dorme no jardim e as crianças não fazem barulho."),
            ("it", "Il cane dorme nel giardino e i bambini non fanno rumore, ma sono felici."),
            ("vi", "Con chó ngủ trong vườn và những đứa trẻ không làm ồn."),
            ("ru", "Собака спит в саду, и дети не шумят, потому что это её дом."),
            ("uk", "Собака спить у саду, і діти не шумлять, бо це її дім."),
            ("ja", "犬は庭で寝ています。子供たちは静かです。"),
            ("zh-cn", "狗在花园里睡觉，孩子们很安静。"),
            ("ko", "개가 정원에서 자고 있고 아이들은 조용합니다."),
            ("hi", "कुत्ता बगीचे में सो रहा है और बच्चे शोर नहीं कर रहे हैं।"),
            ("mr", "कुत्रा बागेत झोपला आहे आणि मुले शांत आहेत."),
            ("ar", "الكلب نائم في الحديقة والأطفال لا يصدرون أي ضجيج."),
            ("fa", "سگ در باغ خوابیده است و بچه ها سر و صدا نمی کنند."),
            ("ta", "நாய் தோட்டத்தில் தூங்குகிறது."),
            ("sw", "Mbwa analala katika bustani na watoto ni kimya kwa sababu ya usiku."),
            ("fi", "Koira nukkuu puutarhassa ja lapset ovat hiljaa, mutta se ei ole vihainen."),
        ];
        for (code, text) in texts {
            let language = Language::named(code).unwrap();
            assert!(is_language(text, language), "{code}: {}", detect(text, text.chars().count()));
            if code != "en" {
                assert!(!is_language(text, Language::English), "{code} is no English");
            }
        }
        assert!(Language::named("xx").is_none());
        assert!(is_language("123", Language::English));
    }
}
